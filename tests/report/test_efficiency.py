"""Efficiency of a plan; lanes that share a link are one resource, in plans and in timelines."""

from __future__ import annotations

import pytest

from bigplan.planner import simulate_plan
from bigplan.program import LINKS, Lane
from bigplan.report.efficiency import covered, efficiency_of, resource_seconds
from bigplan.report.operators import operator_rows
from bigplan.simulate import COLLECTIVES, LAUNCHING
from bigplan.timeline import Event, Timeline
from tests.report.test_operators import planned


def event(lane: Lane, start: float, end: float, stage: int = 0) -> Event:
    return Event(stage, lane, "forward", 0, 0, start, end)


@pytest.mark.parametrize(
    ("events", "share"),
    [
        (
            [event(Lane.COMPUTE, 0, 5), event(Lane.COMM, 3, 8)],
            0.8,
        ),  # at once: counted once
        ([event(Lane.COMPUTE, 0, 2), event(Lane.COMM, 4, 5)], 0.3),
        ([event(Lane.COMPUTE, 0, 2), event(Lane.H2D, 2, 9)], 0.2),  # copies are no kernels
        ([event(Lane.COMPUTE, 2, 9), event(Lane.COMM, 3, 4)], 0.7),
        ([event(Lane.COMPUTE, 2, 4), event(Lane.GPU_UPDATE, 3, 5)], 0.3),
    ],
)
def test_utilisation_is_the_share_of_time_in_which_some_kernel_runs(
    events: list[Event], share: float
) -> None:
    plan = planned("resident")
    found = efficiency_of(plan, Timeline(tuple(events), 10.0), operator_rows(plan))
    assert found.utilisation == pytest.approx(share)


def test_utilisation_says_nothing_about_efficiency() -> None:
    plan = planned("recomputed")
    rows = operator_rows(plan)
    whole = Timeline((event(Lane.COMPUTE, 0, plan.predicted.step_seconds),), 1.0)
    found = efficiency_of(plan, whole, rows)
    assert found.mfu == plan.predicted.mfu < 0.5
    assert found.mfu < found.hfu < 1.0
    assert sum(found.by_bound.values()) == pytest.approx(1.0)
    assert found.memory_share < 1.0


def test_work_that_runs_twice_counts_only_in_the_hardware_s_share() -> None:
    shares = {}
    for case in ("resident", "recomputed"):
        plan = planned(case)
        found = efficiency_of(plan, Timeline((), 1.0), operator_rows(plan))
        shares[case] = found.hfu / found.mfu
    assert shares["recomputed"] > 1.2 * shares["resident"]


def lane_event(lane: Lane, start: float, end: float, stage: int = 0) -> Event:
    return Event(stage, lane, "copy", 0, -1, start, end)


def test_what_shares_a_link_is_told_as_one() -> None:
    predicted = planned("streamed").predicted
    assert {Lane.H2D, Lane.D2H} <= set(predicted.busy_seconds)
    assert not set(LINKS) & {*predicted.busy_seconds, *predicted.moved_bytes}
    assert Lane.GPU_UPDATE not in predicted.moved_bytes  # it moves nothing


def test_copies_that_take_turns_on_a_link_are_not_counted_twice() -> None:
    events = (
        lane_event(Lane.H2D, 0.0, 4.0),
        lane_event(Lane.STATE_IN, 1.0, 5.0),
        lane_event(Lane.STATE_IN, 7.0, 8.0),
        lane_event(Lane.STATE_OUT, 0.0, 2.0),
        lane_event(Lane.COMPUTE, 0.0, 9.0),
        lane_event(Lane.H2D, 0.0, 1.0, stage=1),
    )
    assert resource_seconds(Timeline(events, 9.0)) == {
        Lane.H2D: 6.0,
        Lane.D2H: 2.0,
        Lane.COMPUTE: 9.0,
    }
    assert covered([]) == 0.0


def test_a_simulated_step_works_as_long_as_the_plan_says() -> None:
    plan = planned("streamed")
    played, promised = simulate_plan(plan), plan.predicted.busy_seconds
    worked = resource_seconds(played)
    told = {name: seconds for name, seconds in promised.items() if name in worked}
    told[Lane.COMPUTE] += sum(promised.values()) - sum(told.values())  # waits within its passes
    assert set(promised) - set(worked) <= {COLLECTIVES, LAUNCHING}
    assert worked == pytest.approx(told)
