"""`bigplan doctor`."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bigplan.cli.as_json import AsJson, print_json
from bigplan.errors import PreflightError

if TYPE_CHECKING:
    from bigplan.doctor import Finding

_SIGNS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("wrong", "red")}


def doctor(
    folder: Annotated[
        Path, typer.Option("--folder", help="Where runs and offloaded tensors would go.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Say what of bigplan works on this machine, and what to do about the rest.

    Looks at packages, engines, GPUs, memory and its limits, the drive, the compiler, ports and Ray;
    changes nothing and measures nothing. Exit codes: 0, also with notes, 4 something is wrong.
    """
    from bigplan.doctor import examine

    found = tuple(examine(folder.expanduser()))
    if as_json:
        print_json({"findings": [asdict(one) for one in found]})
    else:
        _show(found)
    wrong = [one.name for one in found if one.state == "bad"]
    if wrong:
        raise typer.Exit(PreflightError.exit_code)


def _show(found: tuple[Finding, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for topic, findings in groupby(found, lambda one: one.topic):
        table.add_row(Text(topic, "bold"), "", "")
        for one in findings:
            sign, colour = _SIGNS[one.state]
            told = Text(one.found)
            if one.remedy:
                told.append(f"\n-> {one.remedy}", "bold")
            table.add_row(Text(sign, colour), Text(one.name), told)
    Console().print(table)
