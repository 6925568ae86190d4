"""A report as text, wide enough that no cell wraps."""

from pathlib import Path

from rich.console import Console, RenderableType


def shown(report: RenderableType, width: int = 250) -> str:
    console = Console(width=width, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(report)
    return console.export_text()
