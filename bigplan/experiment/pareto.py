"""Points that no other point dominates."""

from __future__ import annotations

from collections.abc import Sequence

from bigplan.experiment.row import StudyRow


def objectives(row: StudyRow) -> tuple[float, ...]:
    """Seconds and dollars a million tokens, bytes of the fullest GPU, bytes written to drives.

    Figures have three digits, as displayed, because plans do not differ in the fourth. Without a
    price, node-hours stand for dollars, which gives the same order within one cluster.
    """
    assert row.tokens_per_second is not None, "a planned row has them"
    dollars = row.dollars_per_million_tokens
    cost = row.node_hours_per_million_tokens if dollars is None else dollars
    figures = (
        1e6 / row.tokens_per_second,
        cost or 0.0,
        float(row.gpu_bytes or 0),
        row.drive_bytes_per_million_tokens or 0.0,
    )
    return tuple(float(f"{figure:.3g}") for figure in figures)


def front(rows: Sequence[StudyRow]) -> tuple[int, ...]:
    """Numbers of planned rows that no row of the same model and unit of cost dominates.

    Of equal rows only the first is included.
    """
    planned = [(number, row) for number, row in enumerate(rows) if row.status == "planned"]
    return tuple(
        number
        for number, row in planned
        if not any(
            _comparable(row, other) and _beats(other, row, first=earlier < number)
            for earlier, other in planned
            if earlier != number
        )
    )


def _comparable(one: StudyRow, other: StudyRow) -> bool:
    """Whether rows compare: tokens of another model are neither better nor worse."""
    same = (one.model, one.parameters) == (other.model, other.parameters)
    priced = [row.dollars_per_million_tokens is not None for row in (one, other)]
    return same and (priced[0] == priced[1])


def _beats(one: StudyRow, other: StudyRow, *, first: bool) -> bool:
    pairs = list(zip(objectives(one), objectives(other), strict=True))
    return all(a <= b for a, b in pairs) and (first or any(a < b for a, b in pairs))
