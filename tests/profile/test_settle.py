from itertools import count, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.profile.settle import TOLERANCE, WINDOWS, settled, until_settled
from tests.profile.clock import FakeClock

LEVELS = st.floats(1e-3, 1e6)


@given(LEVELS, st.integers(0, 4 * WINDOWS))
def test_a_steady_rate_settles_as_soon_as_there_are_two_groups(level: float, n: int) -> None:
    assert settled([level] * n) is (n >= 2 * WINDOWS)


@given(LEVELS, st.floats(0.5, 0.995), st.integers(2 * WINDOWS, 40))
def test_a_rate_that_keeps_falling_never_settles(level: float, factor: float, n: int) -> None:
    rates = [level * factor**i for i in range(n)]
    assert not settled(rates)
    assert not settled(rates[::-1])  # nor one that rises: a GPU that wakes up


@given(LEVELS, st.floats(1e-3, 0.5), st.floats(0, 0.5 ** (1 / WINDOWS)))
def test_once_a_fall_has_settled_hardly_any_of_it_is_left(
    level: float, height: float, factor: float
) -> None:
    """Exponential, and it at least halves from group to group."""
    rates: list[float] = []
    for i in count():
        rates.append(level * (1 + height * factor**i))
        if settled(rates):
            break
    last = sum(rates[-WINDOWS:]) / WINDOWS
    assert last / level - 1 <= 1.05 * TOLERANCE
    assert len(rates) < 40 * WINDOWS


@given(st.lists(st.floats(0.998, 1.002), min_size=2 * WINDOWS, max_size=30), LEVELS)
def test_noise_below_the_tolerance_is_no_change(noise: list[float], level: float) -> None:
    assert settled([level * part for part in noise])


@given(LEVELS, st.lists(st.floats(0.5, 1.5), max_size=20))
def test_only_the_last_two_groups_count(level: float, earlier: list[float]) -> None:
    assert settled(earlier + [level] * (2 * WINDOWS))


def test_taking_ends_when_the_rate_settles() -> None:
    clock = FakeClock()
    falling = [1.5, 1.4, 1.2, 1.05]
    rates = iter(falling + [1.0] * 50)
    assert until_settled(rates, 100.0, clock) == tuple(falling + [1.0] * (2 * WINDOWS))


@pytest.mark.parametrize("seconds", [0.3, 2.0, 7.9])
def test_or_when_the_time_is_over(seconds: float) -> None:
    clock = FakeClock()
    rates = (0.9**i * clock.work(0.25) for i in count())
    taken = until_settled(rates, seconds, clock)
    assert seconds <= clock.now < seconds + 0.25
    assert len(taken) == clock.now / 0.25


def test_without_time_nothing_is_taken() -> None:
    assert until_settled(repeat(1.0), 0.0, FakeClock()) == ()
