"""How tables of predictions are summed up: step times, peak memory, picks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.validate.quality import (
    Quality,
    group_quality,
    memory_quality,
    pick_regret,
    spearman,
)
from bigplan.validate.score import Scored


def _scored(
    id_: str, predicted: float, measured: float, trust: str = "A", status: str = "scored"
) -> Scored:
    return Scored(
        id_,
        id_.rsplit("-", 1)[0],
        trust,
        status,  # type: ignore[arg-type]
        predicted_step_s=predicted,
        measured_step_s=measured,
        error_pct=100 * (predicted / measured - 1),
    )


def test_quality_by_hand() -> None:
    rows = [
        _scored("lab-1", 1.1, 1.0),  # +10%
        _scored("lab-2", 1.6, 2.0),  # -20%
        _scored("lab-3", 3.0, 3.0),
        _scored("lab-4", 9.9, 9.0, trust="B"),  # +10%
        _scored("other-1", 2.0, 1.0, trust="B"),
        _scored("other-2", 2.0, 1.0, status="skipped"),
    ]
    found = group_quality(rows)
    assert list(found) == ["all of trust A", "lab", "other"]
    lab = found["lab"]
    assert lab.n == 4
    assert (lab.mape, lab.median_ape) == pytest.approx((10.0, 10.0))
    assert (lab.bias, lab.spearman) == pytest.approx((0.0, 1.0))
    assert found["other"] == Quality(1, 100.0, 100.0, 100.0, None)
    trusted = found["all of trust A"]
    assert trusted.n == 3
    assert (trusted.mape, trusted.bias) == pytest.approx((10.0, -10 / 3))


def test_nothing_scored_is_no_table() -> None:
    assert group_quality([]) == {}
    assert group_quality([_scored("lab-1", 1.0, 1.0, status="skipped")]) == {}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [30, 20, 10], -1.0),
        ([1, 2, 3, 4], [10, 1000, 20, 30], 0.4),  # 1 - 6 x 6 / (4 x 15)
        ([1, 2, 2, 3], [1, 2, 3, 4], 0.9486833),  # ties share rank 2.5: 4.5 / sqrt(4.5 x 5)
        ([1, 1, 1], [1, 2, 3], None),  # no order to compare
        ([1, 2], [1, 2], None),  # too few
        ([], [], None),
    ],
)
def test_rank_correlation(a: list[float], b: list[float], expected: float | None) -> None:
    found = spearman(a, b)
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-6))


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=12, unique=True))
def test_rank_correlation_knows_order_only(values: list[float]) -> None:
    assert spearman(values, [value**3 for value in values]) == pytest.approx(1.0)
    assert spearman(values, [-value for value in values]) == pytest.approx(-1.0)


def test_peaks_are_told_apart_by_what_they_count() -> None:
    def peak(id_: str, predicted: float, measured: float | None, kind: str) -> Scored:
        return replace(
            _scored(id_, 1.0, 1.0, status="skipped"),
            predicted_peak_gb=predicted,
            measured_peak_gb=measured,
            memory_kind=kind,
        )

    rows = [
        peak("lab-1", 11.0, 10.0, "reserved"),
        peak("lab-2", 27.0, 30.0, "reserved"),
        peak("lab-3", 5.0, 10.0, "allocated"),
        peak("lab-4", 5.0, None, "allocated"),
        replace(peak("lab-5", 5.0, 50.0, "allocated"), trust="C"),
    ]
    found = memory_quality(rows)
    assert {name: one.n for name, one in found.items()} == {
        "all of trust A": 3,
        "lab, allocated": 1,
        "lab, reserved": 2,
    }
    assert found["lab, reserved"].mape == pytest.approx(10)
    assert found["lab, reserved"].bias == pytest.approx(0)
    assert found["lab, allocated"].bias == pytest.approx(-50)


def test_a_pick_costs_what_it_is_slower_than_the_best() -> None:
    def run(id_: str, predicted: float, measured: float, sweep: str, trust: str = "A") -> Scored:
        return replace(_scored(id_, predicted, measured, trust), sweep=sweep)

    rows = [
        run("lab-1", 1.0, 1.2, "one"),  # picked, 20% slower than the best
        run("lab-2", 1.1, 1.0, "one"),
        run("lab-3", 2.0, 2.0, "two"),  # picked, the best
        run("lab-4", 3.0, 2.5, "two", trust="B"),
        run("lab-5", 1.0, 9.0, "alone"),
        run("other-1", 5.0, 3.9, "twice"),  # one configuration run twice: 4.4 on average
        run("other-2", 5.0, 4.9, "twice"),
        run("other-3", 6.0, 4.0, "twice"),
        run("other-4", 7.0, 4.0, "repeated"),  # no choice
        run("other-5", 7.0, 8.0, "repeated"),
    ]
    found = pick_regret(rows)
    lab, other = found["lab"], found["other"]
    assert (lab.sweeps, other.sweeps) == (2, 1)
    assert (lab.mean, lab.largest, other.mean) == pytest.approx((10, 20, 10))
    assert found["all of trust A"].sweeps == 2
    assert pick_regret([]) == {}
