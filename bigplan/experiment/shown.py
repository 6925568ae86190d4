"""An experiment for a reader: all points, the best, and those that no other dominates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bigplan.bill import DAY
from bigplan.experiment.pareto import front
from bigplan.experiment.row import StudyRow
from bigplan.experiment.running import StudyOutcome
from bigplan.experiment.table import error_of
from bigplan.report.bill import days_text, dollars_text
from bigplan.report.text import bytes_text, seconds_text, table
from bigplan.units import counted, format_count

SHOWN = 60  # points in a table; the files have all points
WIDE = 7  # columns that leave no room for a strategy in words
BOUND, STRATEGY = "bound by", "strategy"


def outcome_report(outcome: StudyOutcome) -> RenderableType:
    """The best point, every point, the Pareto table, and why points failed."""
    parts: list[RenderableType] = [Text(headline(outcome)), points_table(outcome)]
    if len(outcome.rows) > SHOWN:
        parts.append(Text(f"The first {SHOWN} of {len(outcome.rows)} points; results.csv has all."))
    if sum(row.status == "planned" for row in outcome.rows) > 1:
        parts.append(pareto_table(outcome))
    parts += [Text(line) for line in failures(outcome)]
    return Group(*parts)


def headline(outcome: StudyOutcome) -> str:
    """The answer in a sentence: the largest, cheapest or fastest point."""
    rows = [row for row in outcome.rows if row.status == "planned"]
    told = f"{counted(len(outcome.rows), 'point')}, {len(rows)} planned."
    best = best_point(outcome)
    if best is None:
        late = bool(rows) and outcome.index.within is not None
        why = " None ends in time." if late else ""
        return told + why
    row, number = outcome.rows[best], f"point {best}{point_text(outcome, best)}"
    if outcome.index.largest is not None:
        return f"{told} Largest {outcome.index.largest}: {row.found}, {number}."
    what = "Cheapest" if outcome.index.prefer == "cheapest" else "Fastest"
    within = outcome.index.within
    limit = "" if within is None else f" within {days_text(within / DAY)}"
    return f"{told} {what}{limit}: {number}; {takes_text(row)}."


def takes_text(row: StudyRow) -> str:
    """A row's nodes, step and bill in a line."""
    assert row.step_seconds is not None and row.nodes is not None, "a planned row has them"
    parts = [
        f"{row.cluster}, {counted(row.nodes, 'node')}",
        f"{seconds_text(row.step_seconds)} a step",
    ]
    if row.days is not None:
        parts.append(days_text(row.days))
    if row.dollars is not None:
        parts.append(dollars_text(row.dollars))
    elif row.dollars_per_million_tokens is not None:
        parts.append(f"{dollars_text(row.dollars_per_million_tokens)} per 1 M tokens")
    return ", ".join(parts)


def best_point(outcome: StudyOutcome) -> int | None:
    """The number of the point that the file asks for; None where no point qualifies.

    Where some points have no price, only those with one can be the cheapest.
    """
    able = [n for n, row in enumerate(outcome.rows) if row.status == "planned"]
    able = [n for n in able if outcome.rows[n].in_time is not False]
    if outcome.index.largest is not None:
        return max(able, key=lambda n: (outcome.rows[n].found or 0, -n), default=None)
    if outcome.index.prefer == "cheapest":
        priced = [n for n in able if outcome.rows[n].dollars_per_million_tokens is not None]
        return min(priced or able, key=lambda n: (_cost(outcome.rows[n]), n), default=None)
    return max(able, key=lambda n: (outcome.rows[n].tokens_per_second or 0.0, -n), default=None)


def _cost(row: StudyRow) -> float:
    dollars = row.dollars_per_million_tokens
    return (row.node_hours_per_million_tokens or 0.0) if dollars is None else dollars


def point_text(outcome: StudyOutcome, number: int) -> str:
    """The point's swept keys and values, ' (nodes=4)'; empty where nothing is swept."""
    values = outcome.index.points[number].values
    told = _told(outcome, values, "=")
    return f" ({told})" if told else ""


def _told(outcome: StudyOutcome, values: Mapping[str, Any], between: str) -> str:
    keys = short_keys(outcome).items()
    return ", ".join(f"{short}{between}{values[key]}" for key, short in keys if key in values)


def _swept(outcome: StudyOutcome) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Headings and, for every point, cells of what is swept.

    Every key has a column. Where some points lack a key, one column tells each point's own keys.
    """
    keys, points = short_keys(outcome), [point.values for point in outcome.index.points]
    if any(values.keys() != keys.keys() for values in points):
        return ["point"], [[_told(outcome, values, " ")] for values in points]
    return list(keys.values()), [[str(values[key]) for key in keys] for values in points]


def short_keys(outcome: StudyOutcome) -> dict[str, str]:
    """Swept keys, shortened to the last parts that distinguish them."""
    keys = outcome.index.keys
    last = Counter(key.rpartition(".")[2] for key in keys)
    return {
        key: key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in keys
    }


def points_table(outcome: StudyOutcome, most: int | None = SHOWN) -> Table:
    """A line for each of the first `most` points: swept keys, predicted, measured where it was
    launched, ranks by both.
    """
    columns, (keys, swept) = list(_columns(outcome)), _swept(outcome)
    if len(keys) + len(columns) > WIDE:
        columns = [column for column in columns if column[0] != STRATEGY]
    names = ["#", *keys, *(name for name, _ in columns)]
    numbers = ["#", *(name for name, _ in columns if name not in (BOUND, STRATEGY))]
    rows = table("Points", *names, right=numbers, whole=numbers)
    for number, point in enumerate(swept[:most]):
        rows.add_row(str(number), *point, *(cells[number] for _, cells in columns))
    return rows


def _columns(outcome: StudyOutcome) -> Iterator[tuple[str, Sequence[str]]]:
    """Columns that are not empty, with a text for every point."""
    rows, measured = outcome.rows, outcome.measured
    if outcome.index.largest is not None:
        yield "largest", [_or(row.found, str) for row in rows]
    chosen = outcome.index.prefer == "cheapest"  # then a point's own number is the most
    stated = all("nodes" in point.values for point in outcome.index.points)
    if len({row.nodes for row in rows}) > 1 and (chosen or not stated):
        yield "nodes", [_or(row.nodes, str) for row in rows]
    yield "step", [_or(row.step_seconds, seconds_text) for row in rows]
    if measured:
        reached = [measured[n].step_seconds if n in measured else None for n in range(len(rows))]
        yield "measured", [_or(seconds, seconds_text) for seconds in reached]
        errors = [error_of(row.step_seconds, s) for row, s in zip(rows, reached, strict=True)]
        yield "error", [_or(error, lambda e: f"{e:+.1%}") for error in errors]
        launched = [row.step_seconds if n in measured else None for n, row in enumerate(rows)]
        yield "rank", [_or(rank, str) for rank in ranks(_per_token(rows, launched))]
        yield "rank then", [_or(rank, str) for rank in ranks(_per_token(rows, reached))]
    if not measured:
        yield "tokens/s", [_or(row.tokens_per_second, _three) for row in rows]
    yield "GPU", [_or(row.gpu_bytes, bytes_text) for row in rows]
    if any(row.dollars for row in rows):  # of the whole training
        yield "dollars", [_or(row.dollars, dollars_text) for row in rows]
    elif any(row.dollars_per_million_tokens for row in rows):
        yield "$ / M tokens", [_or(row.dollars_per_million_tokens, dollars_text) for row in rows]
    if any(row.days for row in rows):
        yield "days", [_or(row.days, lambda days: f"{days:.3g}") for row in rows]
    if len({row.engine for row in rows if row.engine}) > 1 and "engine" not in outcome.index.keys:
        yield "engine", [_or(row.engine, str) for row in rows]
    if not measured:
        yield BOUND, [_or(row.bottleneck, str) for row in rows]
        yield STRATEGY, [row.strategy or "failed" for row in rows]


def _per_token(rows: Sequence[StudyRow], seconds: Sequence[float | None]) -> list[float | None]:
    """Seconds a token, because steps may differ in size."""
    pairs = zip(rows, seconds, strict=True)
    return [
        None if s is None or not row.tokens_per_step else s / row.tokens_per_step
        for row, s in pairs
    ]


def ranks(values: Sequence[float | None]) -> list[int | None]:
    """Ranks from 1 for the smallest; equal values share a rank."""
    known = sorted(value for value in values if value is not None)
    return [None if value is None else known.index(value) + 1 for value in values]


def pareto_table(outcome: StudyOutcome) -> Table:
    """Points that no other dominates in time, dollars, memory and drive wear."""
    keys, swept = _swept(outcome)
    figures = ["#", "step", "tokens/s", "cost", "GPU", "to drives"]
    names = ["#", *keys, *figures[1:]]
    title = "Pareto: no other point is better in all of these (cost and writes of 1 M tokens)"
    rows = table(title, *names, right=figures, whole=figures)
    for number in front(outcome.rows)[:SHOWN]:
        row = outcome.rows[number]
        dollars = row.dollars_per_million_tokens
        hours = f"{row.node_hours_per_million_tokens:.3g} node-h"
        rows.add_row(
            str(number),
            *swept[number],
            _or(row.step_seconds, seconds_text),
            _or(row.tokens_per_second, _three),
            hours if dollars is None else dollars_text(dollars),
            _or(row.gpu_bytes, bytes_text),
            bytes_text(row.drive_bytes_per_million_tokens or 0.0),
        )
    return rows


def accuracy_text(outcome: StudyOutcome) -> str:
    """Errors of the predictions, and how many pairs they order as the clock did."""
    pairs = [
        (row.step_seconds / row.tokens_per_step, seconds / row.tokens_per_step)
        for number, found in sorted(outcome.measured.items())
        if (row := outcome.rows[number]).step_seconds
        and (seconds := found.step_seconds)
        and row.tokens_per_step
    ]
    if not pairs:
        command = "`bigplan experiment run FILE --launch`"
        failed = sum(bool(found.reason) for found in outcome.measured.values())
        if failed:
            told = counted(failed, "launch", "launches")
            return f"Nothing was measured: {told} failed; {command} tries again."
        return f"Nothing was measured yet: {command} launches the points."
    off = sum(abs(before / after - 1) for before, after in pairs) / len(pairs)
    text = f"{counted(len(pairs), 'point')} measured, predictions off by {off:.1%} on average"
    orders = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for i, a in enumerate(pairs) for b in pairs[:i]]
    if orders:
        text += f"; {sum(orders)} of {counted(len(orders), 'pair')} in the predicted order"
    return f"{text}."


def failures(outcome: StudyOutcome) -> Iterator[str]:
    """Each reason once, with its points."""
    reasons: dict[str, list[int]] = {}
    for number, row in enumerate(outcome.rows):
        if row.status == "failed":
            reasons.setdefault(row.reason, []).append(number)
    for number, found in sorted(outcome.measured.items()):
        if found.reason:
            reasons.setdefault(f"launch failed: {found.reason}", []).append(number)
    for reason, numbers in reasons.items():
        named = ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
        yield f"Point{'s' * (len(numbers) > 1)} {named}: {reason}"


def _or(value: Any, text: Any) -> str:
    return "-" if value is None else str(text(value))


def _three(value: float) -> str:
    return format_count(float(f"{value:.3g}"))
