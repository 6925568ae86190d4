"""How good the predictions of several rows are: step times, peak memory, and picks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean, median

from bigplan.validate.score import Scored

TRUSTED = "all of trust A"
EXPERTS = "with experts"  # runs of models that have them are in tables of their own


@dataclass(frozen=True, slots=True)
class Quality:
    """Errors of several rows, in percent; `bias` is the mean signed error."""

    n: int
    mape: float
    median_ape: float
    bias: float
    spearman: float | None


@dataclass(frozen=True, slots=True)
class Regret:
    """Percent by which the run predicted fastest was slower than the fastest, over `sweeps`."""

    sweeps: int
    mean: float
    largest: float


def group_quality(scored: Iterable[Scored]) -> dict[str, Quality]:
    """Quality of step times: each table without its rows of trust C, and all rows of trust A.

    Rows with experts are apart.
    """
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in _usable(scored):
        pair = one.predicted_step_s or 0.0, one.measured_step_s or 0.0
        for name in _tables(one, one.group):
            groups[name].append(pair)
    return {name: _quality(pairs) for name, pairs in sorted(groups.items())}


def memory_quality(scored: Iterable[Scored]) -> dict[str, Quality]:
    """Quality of peak memory: each table, by what its peaks count, and all rows of trust A."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in scored:
        if one.trust != "C" and one.predicted_peak_gb and one.measured_peak_gb:
            pair = one.predicted_peak_gb, one.measured_peak_gb
            for name in _tables(one, f"{one.group}, {one.memory_kind}"):
                groups[name].append(pair)
    return {name: _quality(pairs) for name, pairs in sorted(groups.items())}


def pick_regret(scored: Iterable[Scored]) -> dict[str, Regret]:
    """Regret of picks: each table, and all rows of trust A.

    A sweep consists of a table's runs with the same model, GPUs and batch in two or more
    configurations. A configuration that was run several times counts with its mean.
    """
    sweeps: dict[tuple[str, str], list[Scored]] = defaultdict(list)
    for one in _usable(scored):
        for name in _tables(one, one.group):
            sweeps[name, one.sweep].append(one)
    regrets: dict[str, list[float]] = defaultdict(list)
    for (name, _), runs in sweeps.items():
        if len(configurations := _configurations(runs)) > 1:
            picked = configurations[min(configurations)]
            regrets[name].append(100 * (picked / min(configurations.values()) - 1))
    return {
        name: Regret(len(found), fmean(found), max(found))
        for name, found in sorted(regrets.items())
    }


def _configurations(runs: Sequence[Scored]) -> dict[float, float]:
    """Mean measured seconds by predicted seconds, which are the same within a configuration."""
    measured: dict[float, list[float]] = defaultdict(list)
    for one in runs:
        measured[one.predicted_step_s or 0.0].append(one.measured_step_s or 0.0)
    return {predicted: fmean(found) for predicted, found in measured.items()}


def _tables(one: Scored, table: str) -> Iterable[str]:
    """Names of the tables that a row counts in: its own, and that of all rows like it."""
    if one.experts:
        return f"{table}, {EXPERTS}", f"all {EXPERTS}", f"experts, trust {one.trust}"
    return (table, TRUSTED) if one.trust == "A" else (table,)


def _usable(scored: Iterable[Scored]) -> Iterable[Scored]:
    """Scored rows without those of trust C, which have equal columns but results far apart."""
    return (one for one in scored if one.status == "scored" and one.trust != "C")


def _quality(pairs: Sequence[tuple[float, float]]) -> Quality:
    """Quality of pairs of predicted and measured."""
    errors = [100 * (predicted / measured - 1) for predicted, measured in pairs]
    sizes = [abs(error) for error in errors]
    predicted, measured = zip(*pairs, strict=True)
    return Quality(
        len(errors), fmean(sizes), median(sizes), fmean(errors), spearman(predicted, measured)
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation, equal values sharing their mean rank; None for fewer than three rows."""
    if len(a) < 3:
        return None
    x, y = _ranks(a), _ranks(b)
    mean = (len(a) + 1) / 2
    over = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    under = (sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y)) ** 0.5
    found = over / under if under else float("nan")
    return found if isfinite(found) else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for place in order[start:stop]:
            ranks[place] = (start + stop + 1) / 2
        start = stop
    return ranks
