"""What a training reads, looked for before a launch spends seconds, and after a plan is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bigplan.errors import InputError

if TYPE_CHECKING:
    from bigplan.spec.model import ModelSpec
    from bigplan.spec.training import Training


def unreadable_data(model: ModelSpec, training: Training) -> Iterator[InputError]:
    """Data of training and validation that is not on this machine, or not for this model."""
    named = [training.data, *([training.validation.data] if training.validation else [])]
    for data in named:
        if data != "bundled":
            from bigplan.data.prepared import check_vocabulary, open_tokens

            try:
                check_vocabulary(open_tokens(Path(data).expanduser()), model.vocab, model.name)
            except InputError as error:
                yield error


def require_inputs(model: ModelSpec, training: Training, *, weights: bool) -> None:
    """What the workers of a launch check too, seconds earlier. `weights`: they are read as well.

    Raises InputError, and RefusedError for weights that are not read.
    """
    for error in unreadable_data(model, training):
        raise error
    if weights and training.weights is not None:
        from bigplan.runtime.hf_weights import HfFolder

        HfFolder.open(Path(training.weights).expanduser(), model)


def warnings(model: ModelSpec, training: Training) -> Iterator[str]:
    """What a launch on this machine would be refused for, and positions its weights never saw.

    Where it is to run may differ.
    """
    hint = "The plan stands; a launch where that is so would be refused"
    for error in unreadable_data(model, training):
        yield f"{error}. {hint}"
    if training.weights is not None and not Path(training.weights).expanduser().is_dir():
        yield (
            f"training.weights: {training.weights} is no folder here; name a Hugging Face folder "
            f"with config.json and safetensors, or leave weights out. {hint}"
        )
    if training.weights is not None and training.sequence_length > model.max_sequence_length:
        yield (
            f"sequence_length {training.sequence_length} is longer than the "
            f"{model.max_sequence_length} positions that {model.name}'s weights were trained for; "
            "the first steps will have to teach it the others"
        )
