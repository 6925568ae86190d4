"""A measured machine beside what its description said before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from bigplan.report.text import percent, table
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.dump import numbers

BLOCKS = ("gpu", "host", "pcie", "nvme")


@dataclass(frozen=True)
class Figure:
    """A number that was measured: as text, beside its text before ('' where there was none)."""

    block: str
    name: str
    measured: str
    before: str
    ratio: float | None  # measured over before


def figures(before: NodeGroup, after: NodeGroup) -> Iterator[Figure]:
    """The numbers of `after` whose source is another than in `before`."""
    for block in BLOCKS:
        old, new = getattr(before, block), getattr(after, block)
        if new is None:
            continue
        was = numbers(old) if old is not None else {}
        told = old.sources if old is not None else {}
        for name, (value, text) in numbers(new).items():
            field, _, _ = name.partition(".")
            known = was.get(name)
            if told.get(field) == new.sources.get(field) or (
                known and "." in name and known[0] == value
            ):
                continue  # a mapping has one source for all its values
            ratio = value / known[0] if known and known[0] else None
            yield Figure(block, name, text, known[1] if known else "", ratio)


def progress_line(before: NodeGroup, after: NodeGroup) -> str:
    """What a probe found, in a line."""
    return ", ".join(f"{figure.name} {figure.measured}" for figure in figures(before, after))


def profile_report(before: NodeGroup, after: NodeGroup) -> Table:
    """All that was measured, beside the description and its source.

    Below it under which conditions products ran: a plan's compute hangs on them most.
    """
    title = f"Measured here, beside what was known of {after.gpu.name} before"
    right = ("measured", "before", "change")
    shown = table(title, "part", "figure", *right, "known from", right=right)
    for figure in figures(before, after):
        block = getattr(before, figure.block)
        known = block.sources.get(figure.name.partition(".")[0], "") if block is not None else ""
        shown.add_row(
            figure.block,
            figure.name,
            figure.measured,
            figure.before or "-",
            _change(figure.ratio),
            known if figure.before else "",
        )
    how = after.gpu.sources["gemm_efficiency"]
    if how != before.gpu.sources["gemm_efficiency"]:
        shown.caption, shown.caption_justify = f"gemm_efficiency: {how}", "left"
    return shown


def _change(ratio: float | None) -> str:
    """'+12%', 'x 3.1' from twice on, '' where nothing is known."""
    if ratio is None:
        return ""
    if not 0.5 < ratio < 2:
        return f"x {ratio:.2g}"
    change = ratio - 1
    return f"{'-' if change < 0 else '+'}{percent(abs(change))}" if abs(change) >= 0.005 else "same"
