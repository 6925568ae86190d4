"""`bigplan export`."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.inputs import require_there
from bigplan.cli.interrupts import unwound
from bigplan.errors import InputError, RefusedError
from bigplan.paths import is_dir
from bigplan.spec.lora import trained_count
from bigplan.units import format_bytes, format_count

if TYPE_CHECKING:
    from bigplan.runtime.checkpoint import FoundCheckpoint


def export(
    what: Annotated[
        Path,
        typer.Argument(
            help="The folder of a run, whose newest checkpoint is taken, or of one checkpoint.",
            metavar="RUN|CHECKPOINT",
        ),
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder to write; it must not exist.")],
    precision: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        typer.Option(
            "--dtype", help="Of the weights; default: the training's precision, of adapters fp32."
        ),
    ] = None,
    merged: Annotated[
        bool,
        typer.Option(
            "--merged", help="Of a run that trained adapters, the whole model with these added."
        ),
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            help="Where the Hugging Face folder that the run started from is now, if it has moved.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder, which transformers loads.

    config.json and safetensors files of at most 5 GB; the tokenizer too, where the run started
    from such a folder. Of a run that trained adapters (LoRA) these alone, as a folder that peft
    loads, or with --merged the whole model.
    Exit codes: 0, 2 bad input or refused, 6 the checkpoint is damaged.
    """
    if find_spec("torch") is None or find_spec("safetensors") is None:
        raise RefusedError(
            "exporting needs torch and safetensors; run: pip install 'bigplan[launch]'"
        )
    found = _found(what.expanduser())
    for problem in found.skipped:
        if not as_json:
            print(f"passed over: {problem}")
    if weights is not None:
        found = _moved(found, weights)
    with unwound():
        dtype, count = _exported(found, to.expanduser(), precision, merged=merged)
    _tell(found, to, dtype, count, as_json=as_json)


def _tell(found: FoundCheckpoint, to: Path, dtype: str, count: int, *, as_json: bool) -> None:
    nbytes = sum(path.stat().st_size for path in to.expanduser().iterdir())
    if as_json:
        told = {"folder": str(to), "step": found.manifest.step, "dtype": dtype}
        sizes = {"parameters": count, "bytes": nbytes}
        print_json({**told, **sizes, "passed_over": [str(each) for each in found.skipped]})
        return
    print(
        f"Wrote {found.manifest.model.name} after step {found.manifest.step} to {to}: "
        f"{format_count(count)} parameters in {dtype}, {format_bytes(nbytes)}"
    )


def _found(run: Path) -> FoundCheckpoint:
    from bigplan.runtime.checkpoint import latest

    require_there(run, "the folder of a run, such as runs/my-model-1, or of one checkpoint")
    inside = run / "checkpoints"
    return latest(inside if is_dir(inside) else run)


def _moved(found: FoundCheckpoint, weights: Path) -> FoundCheckpoint:
    """The checkpoint, with the first weights' folder where it is now. Raises InputError."""
    training = found.manifest.training
    if training.weights is None:
        raise InputError(
            f"--weights {weights}: this run started from random weights; leave --weights out"
        )
    require_there(weights.expanduser(), "the Hugging Face folder that the run started from")
    moved = training.model_copy(update={"weights": str(weights)})
    return replace(found, manifest=found.manifest.model_copy(update={"training": moved}))


def _exported(
    found: FoundCheckpoint, folder: Path, precision: str | None, *, merged: bool
) -> tuple[str, int]:
    """Write the folder; the precision and the number of its parameters."""
    from bigplan.runtime.export.hf import export_checkpoint
    from bigplan.runtime.export.peft import export_adapters, export_merged

    model, training = found.manifest.model, found.manifest.training
    if merged and training.lora is None:
        raise InputError(
            "--merged adds adapters to their model, and this run trained the whole model; "
            "leave --merged out"
        )
    if training.lora is not None and not merged:
        dtype = precision or "fp32"
        export_adapters(found, folder, dtype)
        return dtype, trained_count(model, training.lora)
    dtype = precision or training.precision
    (export_merged if merged else export_checkpoint)(found, folder, dtype)
    return dtype, model.parameter_count
