import pytest

from bigplan.program import Lane
from bigplan.report.efficiency import efficiency_of
from bigplan.report.operators import operator_rows
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
