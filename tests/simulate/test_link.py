"""A shared link against a plain count of what is left of it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bigplan.simulate.link import BusyLink

COPIES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=15)


def _plain(copies: list[tuple[int, int]]) -> list[int]:
    """Ends of copies that take whole seconds of a link, each in turn the first that are free."""
    taken: set[int] = set()
    ends = []
    for start, seconds in copies:
        mine: list[int] = []
        second = start
        while len(mine) < seconds:
            if second not in taken:
                mine.append(second)
            second += 1
        taken |= set(mine)
        ends.append(mine[-1] + 1 if mine else start)
    return ends


@given(COPIES)
def test_copies_fill_the_gaps_that_earlier_ones_leave(copies: list[tuple[int, int]]) -> None:
    link = BusyLink()
    ends = [link.take(float(start), float(seconds)) for start, seconds in copies if seconds]
    assert ends == _plain([copy for copy in copies if copy[1]])
    assert link.end == max(ends, default=0.0)


@given(COPIES, st.sampled_from((0.1, 0.7, 1 / 3)))
@example([(17, 2), (15, 2)], 0.7)
def test_a_copy_that_fits_its_gap_but_for_rounding_fits_it(
    copies: list[tuple[int, int]], unit: float
) -> None:
    link = BusyLink()
    ends = [link.take(start * unit, seconds * unit) for start, seconds in copies if seconds]
    expected = _plain([copy for copy in copies if copy[1]])
    assert ends == pytest.approx([end * unit for end in expected], rel=1e-9)


@given(COPIES, st.integers(1, 9))
def test_a_link_can_be_shifted(copies: list[tuple[int, int]], by: int) -> None:
    first, later = BusyLink(), BusyLink()
    for start, seconds in copies:
        first.take(float(start), float(seconds))
        later.take(float(start + by), float(seconds))
    first.shift(float(by))
    assert first.end in (later.end, float(by))
    assert first.take(50.0 + by, 5.0) == later.take(50.0 + by, 5.0)
