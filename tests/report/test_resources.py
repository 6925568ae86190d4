"""Lanes that share a link are one resource, in plans and in timelines."""

import pytest

from bigplan.planner import simulate_plan
from bigplan.program import LINKS, Lane
from bigplan.report.resources import covered, resource_seconds
from bigplan.simulate import COLLECTIVES, LAUNCHING
from bigplan.timeline import Event, Timeline
from tests.report.test_operators import planned

STREAMED = planned("streamed")


def event(lane: Lane, start: float, end: float, stage: int = 0) -> Event:
    return Event(stage, lane, "copy", 0, -1, start, end)


def test_what_shares_a_link_is_told_as_one() -> None:
    predicted = STREAMED.predicted
    assert {Lane.H2D, Lane.D2H} <= set(predicted.busy_seconds)
    assert not set(LINKS) & {*predicted.busy_seconds, *predicted.moved_bytes}
    assert Lane.GPU_UPDATE not in predicted.moved_bytes  # it moves nothing


def test_copies_that_take_turns_on_a_link_are_not_counted_twice() -> None:
    events = (
        event(Lane.H2D, 0.0, 4.0),
        event(Lane.STATE_IN, 1.0, 5.0),
        event(Lane.STATE_IN, 7.0, 8.0),
        event(Lane.STATE_OUT, 0.0, 2.0),
        event(Lane.COMPUTE, 0.0, 9.0),
        event(Lane.H2D, 0.0, 1.0, stage=1),
    )
    assert resource_seconds(Timeline(events, 9.0)) == {
        Lane.H2D: 6.0,
        Lane.D2H: 2.0,
        Lane.COMPUTE: 9.0,
    }
    assert covered([]) == 0.0


def test_a_simulated_step_works_as_long_as_the_plan_says() -> None:
    played, promised = simulate_plan(STREAMED), STREAMED.predicted.busy_seconds
    worked = resource_seconds(played)
    told = {name: seconds for name, seconds in promised.items() if name in worked}
    told[Lane.COMPUTE] += sum(promised.values()) - sum(told.values())  # waits within its passes
    assert set(promised) - set(worked) <= {COLLECTIVES, LAUNCHING}
    assert worked == pytest.approx(told)
