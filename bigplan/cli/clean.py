"""`bigplan clean`, and what a launch says of those before it that were killed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bigplan.cli.as_json import AsJson, print_json

if TYPE_CHECKING:
    from bigplan.launcher.leftovers import Leftover


def clean(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what launches left on this machine that were killed: scratch, and processes of Ray.

    Records and checkpoints stay, and so does what belongs to a launch that runs.
    """
    from bigplan.launcher.leftovers import clean as remove
    from bigplan.launcher.leftovers import leftovers

    console, found = Console(), leftovers()
    for left in found:
        if not as_json:
            console.print(
                f"{'Would remove' if dry_run else 'Removing'} what was {left}",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip
        if not dry_run:
            remove(left)
    if as_json:
        print_json({"removed": not dry_run, "leftovers": [_told(left) for left in found]})
    elif not found:
        console.print("Nothing is left of launches that were killed.")


def _told(left: Leftover) -> dict[str, object]:
    entry = left.entry
    return {
        "run": str(entry.run),
        "scratch": str(entry.scratch),
        "scratch_bytes": left.scratch,
        "processes": list(left.processes),
    }


def offer(console: Console) -> None:
    """Name what killed launches left, and remove it where the user wants that."""
    from bigplan.launcher.leftovers import clean as remove
    from bigplan.launcher.leftovers import leftovers

    found = leftovers()
    for left in found:
        console.print(f"Still there, {left}", highlight=False, markup=False, soft_wrap=True)
    if not found:
        return
    if not (console.is_terminal and sys.stdin.isatty()):
        console.print("`bigplan clean` removes it", highlight=False, markup=False)
    elif typer.confirm("Remove it?", default=True):
        for left in found:
            remove(left)
