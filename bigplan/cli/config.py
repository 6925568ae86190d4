"""`bigplan config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.inputs import checked_plan
from bigplan.errors import InputError

TargetTool = Literal["deepspeed", "fsdp2", "accelerate", "megatron", "torchtitan", "nemo"]


def config(
    plan: Annotated[Path, typer.Argument(help="A plan written by `bigplan plan --out`.")],
    tool: Annotated[TargetTool, typer.Option("--for", help="Whose configuration.")],
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder to write, new or empty (default: print).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan as another tool's configuration, and say what that cannot express.

    Exit codes: 0, 2 bad input.
    """
    from bigplan.export import configuration

    found = configuration(checked_plan(plan), tool)
    if to is not None:
        _write(to.expanduser(), found.files)
    if as_json:
        print_json({"files": found.files, "cannot_express": list(found.lost)})
        return
    if to is None:
        for name, text in found.files.items():
            print(f"# ----- {name}\n{text}", end="")
    else:
        told = f"Wrote {', '.join(found.files)} to {to.expanduser()}"
        Console().print(told, highlight=False, markup=False)
    console = Console(stderr=True)
    for each in found.lost:
        console.print(
            f"{tool} cannot express: {each}", highlight=False, markup=False, soft_wrap=True
        )


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"--to {folder}: there is something in it; name a new or empty folder")
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--to {folder}: {error.strerror}; name another folder") from None
