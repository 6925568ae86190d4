"""Bars: as few as a browser can draw, and no action lost among them."""

from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.page.lanes import bars
from bigplan.program import Lane, Op
from bigplan.timeline import Event
from tests.examples import examples

LANES = (Lane.COMPUTE, Lane.H2D)
OPS = (Op.FORWARD, Op.BACKWARD, Op.LOAD)


def events_of(draws: list[tuple[int, int, int, float, float]]) -> list[Event]:
    """Events that follow each other in their lanes, after gaps."""
    clocks: dict[tuple[int, Lane], float] = {}
    made: list[Event] = []
    for stage, lane, op, gap, seconds in draws:
        key = stage, LANES[lane]
        start = clocks.get(key, 0.0) + gap
        clocks[key] = start + seconds
        made.append(Event(stage, LANES[lane], OPS[op], len(made), 0, start, start + seconds))
    return made


DRAWS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 2),
        st.floats(0, 0.2),
        st.floats(1e-6, 1),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=examples(60))
@given(DRAWS, st.integers(1, 30))
def test_every_action_is_in_one_bar_of_its_row(
    draws: list[tuple[int, int, int, float, float]], most: int
) -> None:
    events = events_of(draws)
    seconds = max(event.end for event in events)
    drawn = bars(events, seconds, {0}, most)
    assert sum(bar.times for bar in drawn) == len(events)
    assert len(drawn) <= len(events)
    assert sum(bar.busy for bar in drawn) == pytest.approx(sum(event.seconds for event in events))
    assert all(0 < bar.share <= 1 for bar in drawn)
    for _, members in groupby(drawn, key=lambda bar: bar.row):
        row = list(members)
        assert all(a.end <= b.start for a, b in pairwise(row))
    assert {bar.start for bar in drawn} <= {event.start for event in events}
    assert {bar.end for bar in drawn} <= {event.end for event in events}


def test_a_thousand_short_neighbours_are_few_bars() -> None:
    kinds = (Op.FORWARD, Op.BACKWARD)
    events = [
        Event(0, Lane.COMPUTE, kinds[i % 2], i, 0, i / 1e3, (i + 1) / 1e3) for i in range(999)
    ]
    assert len(bars(events, 1.0, most=1000)) == 999
    drawn = bars(events, 1.0, most=50)
    assert len(drawn) <= 50
    assert (drawn[0].start, drawn[-1].end) == (0.0, 0.999)


def test_a_bar_says_what_it_stands_for() -> None:
    events = [Event(1, Lane.H2D, Op.LOAD, i, 0, i / 1e6, (i + 1) / 1e6) for i in range(3, 8)]
    (bar,) = bars([*events], 1.0, most=1)
    assert (bar.row, bar.what, bar.group) == ("host to device", "load", "parameters")
    assert (bar.layers, bar.times) == ("3 to 7", 5)


def test_rows_name_their_stage_where_there_are_several() -> None:
    events = [Event(stage, Lane.COMPUTE, Op.FORWARD, 0, 0, 0.0, 1.0) for stage in (1, 0)]
    assert [bar.row for bar in bars(events, 1.0)] == ["0 · gpu compute", "1 · gpu compute"]
