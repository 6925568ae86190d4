"""`bigplan clean`, and a launch's notice about killed launches before it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bigplan.cli.as_json import AsJson, print_json
from bigplan.errors import RefusedError
from bigplan.system import require_locks

if TYPE_CHECKING:
    from bigplan.launcher.leftovers import Leftover


def clean(
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="On all nodes of a running Ray cluster, too.",
            metavar="HOST:PORT",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what launches left that were killed: scratch, and processes of Ray.

    Records and checkpoints stay, and so does what belongs to a launch that runs. The exit code is 2
    where scratch stays because another launch has its run, or cannot be removed; the rest is gone.
    """
    require_locks("clean")
    from bigplan.launcher.leftovers import clean as remove
    from bigplan.launcher.leftovers import leftovers

    console, told = Console(), list[dict[str, object]]()

    def deal(left: Leftover, remove: Callable[[], None], node: str | None = None) -> None:
        told.append(_told(left) | ({} if node is None else {"node": node}))
        if not as_json:
            _say(
                console,
                f"{'Would remove' if dry_run else 'Removing'} what was {left}"
                f"{'' if node is None else f', on node {node}'}",
            )
        kept = None if dry_run else _why_kept(remove)
        if kept is not None:
            told[-1]["kept"] = kept
            if not as_json:
                _say(console, f"Its scratch stays: {kept}")

    here = leftovers()
    for left in here:
        deal(left, lambda left=left: remove(left))  # type: ignore[misc]
    if address is not None:
        _clean_nodes(address, here, deal)
    if as_json:
        print_json({"removed": not dry_run, "leftovers": told})
    elif not told:
        console.print("Nothing is left of launches that were killed.")
    if any("kept" in each for each in told):
        raise typer.Exit(RefusedError.exit_code)


def _clean_nodes(
    address: str,
    here: tuple[Leftover, ...],
    deal: Callable[[Leftover, Callable[[], None], str], None],
) -> None:
    """Clean the nodes of a cluster, except this machine, which is clean already."""
    from bigplan.launcher.elsewhere import left_on_nodes
    from bigplan.launcher.session import ray_session, require_packages

    require_packages()
    known = {(left.entry.host, left.listed) for left in here}
    with ray_session(address, 0, cuda=False):
        for found in left_on_nodes():
            if (found.left.entry.host, found.left.listed) not in known:
                deal(found.left, found.clean, found.node.there)


def _why_kept(remove: Callable[[], None]) -> str | None:
    """Remove what a launch left; why its scratch stays, if it does."""
    try:
        remove()
    except RefusedError as error:
        return str(error)
    return None


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _told(left: Leftover) -> dict[str, object]:
    entry = left.entry
    return {
        "run": str(entry.run),
        "scratch": str(entry.scratch),
        "scratch_bytes": left.scratch,
        "processes": list(left.processes),
    }


def offer(console: Console) -> None:
    """Name what killed launches left here, and remove it if the user agrees."""
    from bigplan.launcher.leftovers import clean as remove
    from bigplan.launcher.leftovers import leftovers

    found = leftovers()
    for left in found:
        _say(console, f"Still there, {left}")
    if not found:
        return
    if not (console.is_terminal and sys.stdin.isatty()):
        _say(console, "`bigplan clean` removes it")
    elif typer.confirm("Remove it?", default=True):
        for left in found:
            kept = _why_kept(lambda left=left: remove(left))  # type: ignore[misc]
            if kept is not None:
                _say(console, f"Its scratch stays: {kept}")
