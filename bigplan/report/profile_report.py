"""Measured figures of a machine beside those of its description before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from bigplan.report.text import percent, table
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.files.dump import numbers

BLOCKS = ("gpu", "host", "pcie", "nvme", "intra_node", "inter_node")


@dataclass(frozen=True)
class Figure:
    """A measured number as text, and the text of the number before ('' where there was none)."""

    block: str
    name: str
    measured: str
    before: str
    ratio: float | None  # measured over before


def figures(before: NodeGroup, after: NodeGroup) -> Iterator[Figure]:
    """The numbers of `after` whose source differs from that in `before`."""
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
                continue  # a mapping has one source for all its values: equal ones are not new
            ratio = value / known[0] if known and known[0] else None
            yield Figure(block, name, text, known[1] if known else "", ratio)


def progress_line(before: NodeGroup, after: NodeGroup) -> str:
    """The figures that a probe measured, in one line."""
    return ", ".join(f"{figure.name} {figure.measured}" for figure in figures(before, after))


def profile_report(before: NodeGroup, after: NodeGroup) -> Table:
    """A table of all measured figures beside those of the description.

    Its caption names the sources of the figures before. It also names the conditions under which
    matrix products were measured, because a plan's compute time depends most on them.
    """
    title = f"Measured here, beside what was known of {after.gpu.name} before"
    right = ("measured", "before", "change")
    columns = ("part", "figure", *right)
    shown = table(title, *columns, right=right, whole=columns)
    origins: dict[str, list[str]] = {}
    for figure in figures(before, after):
        known = figure.before or "-"
        shown.add_row(figure.block, figure.name, figure.measured, known, _change(figure.ratio))
        if figure.before:
            field, _, _ = figure.name.partition(".")
            origin = getattr(before, figure.block).sources.get(field, "")
            origins.setdefault(origin, []).append(f"{figure.block}.{figure.name}")
    lines = [f"{', '.join(names)} before: {origin}" for origin, names in origins.items() if origin]
    how = after.gpu.sources["gemm_efficiency"]
    if how != before.gpu.sources["gemm_efficiency"]:
        lines.append(f"gemm_efficiency: {how}")
    shown.caption, shown.caption_justify = Text("\n".join(lines)) if lines else None, "left"
    return shown


def _change(ratio: float | None) -> str:
    """'+12%'; 'x 3.1' from twice or half on; '' where there was no number before."""
    if ratio is None:
        return ""
    if not 0.5 < ratio < 2:
        return f"x {ratio:.2g}"
    change = ratio - 1
    return f"{'-' if change < 0 else '+'}{percent(abs(change))}" if abs(change) >= 0.005 else "same"
