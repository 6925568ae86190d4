"""`bigplan export`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.inputs import require_there
from bigplan.errors import RefusedError
from bigplan.units import format_bytes, format_count


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
        typer.Option("--dtype", help="Of the weights; default: the training's precision."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder, which transformers loads.

    config.json and safetensors files of at most 5 GB; the tokenizer too, where the run started
    from such a folder.
    Exit codes: 0, 2 bad input or refused, 6 the checkpoint is damaged.
    """
    if find_spec("torch") is None or find_spec("safetensors") is None:
        raise RefusedError(
            "exporting needs torch and safetensors; run: pip install 'bigplan[launch]'"
        )
    from bigplan.runtime.checkpoint import latest
    from bigplan.runtime.hf_export import export_checkpoint

    run = what.expanduser()
    require_there(run, "the folder of a run, such as runs/my-model-1, or of one checkpoint")
    inside = run / "checkpoints"
    found = latest(inside if inside.is_dir() else run)
    for problem in found.skipped:
        if not as_json:
            print(f"passed over: {problem}")
    dtype = precision or found.manifest.training.precision
    export_checkpoint(found, to.expanduser(), dtype)
    count = found.manifest.model.parameter_count
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
