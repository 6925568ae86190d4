"""Fit the frameworks' constants to published training runs, and score them on sources left out.

    python benchmarks/fit_constants.py                        fit to all rows, print the constants
    python benchmarks/fit_constants.py --score [ROWS.csv]     no fit: the shipped constants' errors
    python benchmarks/fit_constants.py --leave-out            refit without each source in turn

Wants SciPy: pip install 'bigplan[fit]'. A fit takes about a minute, all of --leave-out ten.

What a GPU can do comes from measured and published kernels (bigplan/hardware), not from here, but
for two of which no kernel table was found: GB200 and GB300. Fitted is what a framework makes of a
GPU: one set of constants per framework behaviour, link and physical effect; none per row, table or
site. The objective is the sum over rows of a soft absolute log ratio
(squared below 3%, absolute above) plus a weak pull towards the start, minimised by SciPy's least
squares within what is physical. Left out of it: DeepSpeed's offload table (`ds`), and V100s, whose
tables warn of their noise. The fit starts from the shipped constants.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.fit_model import MEASURED, UNINFORMED, Constants, limits, ratios, shipped
from benchmarks.fit_rows import SOURCES, Priced, priced_rows, report, weights
from bigplan.cost.band import error_class

SOFT = 0.03  # log ratio at which the penalty turns from squared to absolute
PULL = math.sqrt(4e-5) / 0.3  # a constant 35% above its start costs 4e-5


class Problem:
    """Factors of the shipped constants, and the objective of the rows that count."""

    def __init__(self, rows: list[Priced], source: str | None) -> None:
        """All rows, or all but a source's."""
        self._assumed = UNINFORMED.get(source or "", {})
        self._start = shipped()
        self._names = [n for n in self._start if n not in self._assumed and n not in MEASURED]
        counts = weights(rows, SOURCES.get(source or "", ()))
        self._rows = [one for one, count in zip(rows, counts, strict=True) if count]
        self._counts = counts[counts > 0]
        self._touched = {name: self._touches(name) for name in self._names}
        physical = np.array([limits(name) for name in self._names]).T
        within = physical / [self._start[name] for name in self._names]
        self.low, self.high = np.clip(within[0], 1e-3, 1.0), np.maximum(within[1], 1.0)

    def _touches(self, name: str) -> list[int]:
        """The rows that a constant has a part in: they change where it is less by half."""
        halved = self._start | {name: 0.5 * self._start[name]}
        found = ratios(self._rows, halved) != ratios(self._rows, self._start)
        return [int(i) for i in found.nonzero()[0]]

    def constants(self, factors: np.ndarray) -> Constants:
        """The shipped constants times these factors, and what is assumed of the others."""
        pairs = zip(self._names, factors, strict=True)
        at = self._start | {name: self._start[name] * float(factor) for name, factor in pairs}
        return at | {n: at[v] if isinstance(v, str) else v for n, v in self._assumed.items()}

    def residuals(self, factors: np.ndarray) -> np.ndarray:
        """Their squares add up to the objective."""
        wrong = self._soft(ratios(self._rows, self.constants(factors)))
        return np.concatenate([wrong, PULL * np.log(factors)])

    def jacobian(self, factors: np.ndarray) -> np.ndarray:
        """By differences; a constant changes few rows."""
        at = ratios(self._rows, self.constants(factors))
        columns = []
        for i, name in enumerate(self._names):
            some = self._touched[name]
            beside = factors.copy()
            step = -0.01 if factors[i] * 1.01 > self.high[i] else 0.01
            beside[i] *= 1 + step
            moved = at.copy()
            moved[some] = ratios([self._rows[j] for j in some], self.constants(beside))
            columns.append((self._soft(moved) - self._soft(at)) / (beside[i] - factors[i]))
        return np.vstack([np.array(columns).T, np.diag(PULL / factors)])

    def _soft(self, wrong: np.ndarray) -> np.ndarray:
        wrong = wrong / SOFT
        return np.sign(wrong) * SOFT * np.sqrt(2 * self._counts * (np.hypot(1, wrong) - 1))


def fit(rows: list[Priced], source: str | None = None) -> Constants:
    """The constants that fit all rows, or all but a source's."""
    problem = Problem(rows, source)
    limits_of = (problem.low, problem.high)
    found = least_squares(
        problem.residuals, np.ones(len(problem.low)), problem.jacobian, limits_of, ftol=1e-5
    )
    return problem.constants(found.x)


def leave_out(rows: list[Priced]) -> None:
    """Refit without each source in turn, and print the errors on what was left out."""
    classes: dict[str, list[float]] = defaultdict(list)
    for source, tables in SOURCES.items():
        found = ratios(rows, fit(rows, source))
        held = [i for i, one in enumerate(rows) if one.row.group in tables]
        report([rows[i] for i in held], found[held], f"left out: {source}")
        sys.stdout.flush()
        for i in held:
            if rows[i].row.trust != "C":
                run = rows[i].run
                kind = error_class(run.nodes.gpu.name, offloads=run.execution.cpu_update)
                classes[kind].append(float(found[i]))
    print(
        "error bands: class, rows, 80% of predicted over measured: shortest interval, equal tails"
    )
    for name, logs in classes.items():
        low, high = np.exp(shortest(logs, 0.8))
        tails = np.exp(np.quantile(logs, [0.1, 0.9]))
        print(
            f"  {name:24s} {len(logs):5d} {low:6.3f} {high:6.3f}  {tails[0]:6.3f} {tails[1]:6.3f}"
        )


def shortest(values: list[float], share: float) -> tuple[float, float]:
    """The shortest interval that holds at least this share of the values."""
    ordered = sorted(values)
    count = math.ceil(share * len(ordered))
    starts = range(len(ordered) - count + 1)
    start = min(starts, key=lambda i: ordered[i + count - 1] - ordered[i])
    return ordered[start], ordered[start + count - 1]


def main() -> None:
    """Fit or score, as asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--score", action="store_true")
    parser.add_argument(
        "rows", nargs="?", type=Path, help="a file to score in place of the shipped"
    )
    parser.add_argument("--leave-out", action="store_true")
    asked = parser.parse_args()
    rows = priced_rows(asked.rows)
    if asked.score:
        report(rows, ratios(rows, shipped()), "shipped constants")
    elif asked.leave_out:
        leave_out(rows)
    else:
        constants = fit(rows)
        report(rows, ratios(rows, constants), "fitted to all rows")
        print(json.dumps({n: float(f"{v:.4g}") for n, v in constants.items()}, indent=1))


if __name__ == "__main__":
    main()
