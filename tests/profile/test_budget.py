import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.profile.budget import MOST_SAMPLES, SAMPLE_SECONDS, TimeBudget, median_seconds
from tests.profile.clock import FakeClock

WEIGHTS = st.lists(st.floats(0.5, 10), min_size=1, max_size=12)


@given(WEIGHTS, st.floats(1, 300))
def test_allotments_that_are_used_up_fill_the_budget(weights: list[float], seconds: float) -> None:
    clock = FakeClock()
    budget, waiting = TimeBudget(seconds, clock), sum(weights)
    for weight in weights:
        allotted = budget.allot(weight, waiting)
        assert allotted == pytest.approx(seconds * weight / sum(weights))
        clock.work(allotted)
        waiting -= weight
    assert clock.now == pytest.approx(seconds)


@given(WEIGHTS, st.lists(st.floats(0, 3), min_size=12, max_size=12))
def test_a_probe_that_takes_more_or_less_changes_only_what_comes_after(
    weights: list[float], factors: list[float]
) -> None:
    clock = FakeClock()
    budget, waiting = TimeBudget(100.0, clock), sum(weights)
    for weight, factor in zip(weights, factors, strict=False):
        left = budget.left
        allotted = budget.allot(weight, waiting)
        assert 0 <= allotted <= left * (1 + 1e-9)
        clock.work(factor * allotted)
        waiting -= weight


def test_nothing_is_left_after_the_end() -> None:
    clock = FakeClock()
    budget = TimeBudget(10.0, clock)
    clock.work(11.0)
    assert budget.left == budget.allot(1, 2) == 0.0


def timed_with(clock: FakeClock, each: list[float]):  # type: ignore[no-untyped-def] # a closure
    """Runs that take these seconds, then for ever the last."""
    waiting = list(each)

    def timed(runs: int) -> float:
        return sum(
            clock.work(waiting.pop(0) if len(waiting) > 1 else waiting[0]) for _ in range(runs)
        )

    return timed


def test_the_median_leaves_outliers_and_the_first_run_out() -> None:
    clock = FakeClock()
    timed = timed_with(clock, [9.0, 1.0, 1.0, 5.0, 1.0, 0.5, 1.0])
    assert median_seconds(timed, 20.0, clock) == 1.0


@given(st.floats(1e-6, 2.0), st.floats(0.01, 10))
def test_measuring_keeps_to_its_time(once: float, seconds: float) -> None:
    clock = FakeClock()
    assert median_seconds(lambda runs: clock.work(runs * once), seconds, clock) == pytest.approx(
        once
    )
    # Two runs in any case, and the last sample may end as the time does.
    assert clock.now <= max(seconds, 2 * once) * (1 + 1e-6)


def test_short_runs_are_timed_in_batches() -> None:
    clock, batches = FakeClock(), []

    def timed(runs: int) -> float:
        batches.append(runs)
        return clock.work(runs * 1e-5)

    median_seconds(timed, 10.0, clock)
    assert batches[:2] == [1, 1]
    assert set(batches[2:]) == {round(SAMPLE_SECONDS / 1e-5)}
    assert len(batches) == 2 + MOST_SAMPLES


def test_a_run_longer_than_the_time_is_its_own_median() -> None:
    clock = FakeClock()
    timed = timed_with(clock, [40.0, 30.0])
    assert median_seconds(timed, 10.0, clock) == 30.0
    assert clock.now == 70.0


def test_the_least_of_several_times_in_place_of_the_median() -> None:
    clock = FakeClock()
    timed = timed_with(clock, [9.0, 1.0, 1.0, 5.0, 1.0, 0.5, 1.0])
    assert median_seconds(timed, 20.0, clock, min) == 0.5
