"""Whether a training's inputs are on this machine: checked before a launch spends seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bigplan.errors import InputError
from bigplan.paths import is_dir
from bigplan.spec.files.reading import user_path
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.units import be, counted


def unreadable_data(model: ModelSpec, training: Training) -> Iterator[InputError]:
    """Data of training and validation that is not on this machine, or not for this model."""
    named = {"training.data": training.data}
    if training.validation is not None:
        named["training.validation"] = training.validation.data
    for key, data in named.items():
        if data == "bundled" and training.preference is not None:
            from bigplan.data.pairs import NO_PAIRS

            yield InputError(f"{key}: the bundled text has no pairs of responses; {NO_PAIRS}")
        elif data == "bundled" and training.isolate_documents:
            from bigplan.data.documents import no_documents

            yield InputError(f"{key}: {no_documents(data)}")
        elif data != "bundled":
            from bigplan.data.documents import check_documents
            from bigplan.data.pairs import PackedPairs, check_unpaired
            from bigplan.data.prepared import (
                check_length,
                check_targets,
                check_vocabulary,
                open_tokens,
            )

            try:
                tokens = open_tokens(user_path(data))
                check_vocabulary(tokens, model.vocab, model.name)
                if training.preference is not None:
                    PackedPairs.of(tokens, training.sequence_length)
                    continue
                check_unpaired(tokens)
                check_length(tokens, training.sequence_length)
                if training.isolate_documents:
                    check_documents(tokens)
                if key == "training.validation" and training.validation is not None:
                    check_targets(tokens, training.tokens_per_step * training.validation.batches)
            except InputError as error:
                yield InputError(f"{key}: {error}")


def require_inputs(model: ModelSpec, training: Training, *, weights: bool) -> str:
    """What the workers of a launch check too, seconds earlier; a note for the user, or nothing.

    `weights`: they are read as well. Frozen ones always are.
    Raises InputError, and RefusedError for weights that are not read.
    """
    note = ""
    for error in unreadable_data(model, training):
        raise error
    if training.weights is not None and (weights or training.lora is not None):
        from bigplan.runtime.weights.hf import HfFolder

        note = _left_out(
            training.weights, HfFolder.open(user_path(training.weights), model).left_out
        )
    if weights and training.lora is not None and training.lora.weights is not None:
        from bigplan.runtime.weights.peft import PeftFolder

        PeftFolder.open(model, training)
    return note


def data_sizes(training: Training) -> Mapping[Path, int]:
    """Bytes of the data's files, as far as they are on this machine: ranks map them."""
    held_out = training.validation.data if training.validation is not None else None
    found = dict[Path, int]()
    for data in (training.data, held_out):
        if data is not None and data != "bundled":
            with suppress(OSError, InputError):
                path = user_path(data).absolute()
                files = path.iterdir() if is_dir(path) else [path]
                found |= {file: file.stat().st_size for file in files}
    return found


def cut_short(before: Mapping[Path, int]) -> str:
    """What files of these sizes were cut short since, in words; empty: none, or they are gone.

    The system ends a process (SIGBUS) that reads what a mapped file has no more. A file that was
    removed or replaced by another one stays whole for processes that map it.
    """
    for path, size in before.items():
        with suppress(OSError):
            if (now := path.stat().st_size) < size:
                return (
                    f"data {path} was cut from {size:,} to {now:,} bytes while the run read it, "
                    "which ends processes that read the rest (SIGBUS): put the file back, and "
                    "let a run's data be as they are until it ends"
                )
    return ""


def _left_out(folder: str, names: Sequence[str]) -> str:
    """That files hold what their config.json has no place for, such as biases that it denies."""
    if not names:
        return ""
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"Note: {counted(len(names), 'tensor')} of {folder} {be(len(names))} left out, as the "
        f"model has no such parameter: {some}"
    )
