"""What is in use of a memory: never more than was promised, and all of what stays."""

import itertools
from collections import defaultdict
from collections.abc import Callable

import pytest

from bigplan.page.occupancy import Level
from bigplan.page.played import PROCESSES, played
from bigplan.placement import Tier
from bigplan.plan import Plan
from tests.report.test_operators import planned
from tests.tiny import capped_plan, tiny_plan

PLANS: dict[str, Callable[[], Plan]] = {
    "resident": tiny_plan,
    "capped": capped_plan,
    "offloaded": lambda: planned("offloaded"),
    "streamed": lambda: planned("streamed"),
    "tensors and stages": lambda: planned("pipeline"),
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()


def in_use(levels: tuple[Level, ...], moment: float) -> dict[tuple[int, Tier], dict[str, int]]:
    found: dict[tuple[int, Tier], dict[str, int]] = defaultdict(dict)
    for level in levels:
        if level.start <= moment < level.end:
            found[level.stage, level.tier][level.purpose] = level.nbytes
    return found


def test_no_moment_has_more_than_was_promised(plan: Plan) -> None:
    step = played(plan)
    moments = sorted({level.start for level in step.levels})
    promised = {(use.stage, use.tier): use for use in plan.predicted.memory}
    for moment in moments:
        for place, purposes in in_use(step.levels, moment).items():
            assert sum(purposes.values()) <= promised[place].used_bytes, (place, moment)


def test_what_outlasts_a_step_is_there_all_the_time(plan: Plan) -> None:
    step = played(plan)
    for use in plan.predicted.memory:
        for purpose in ("parameters", "optimizer", "workspace", PROCESSES):
            mine = [
                (level.start, level.end, level.nbytes)
                for level in step.levels
                if (level.stage, level.tier, level.purpose) == (use.stage, use.tier, purpose)
            ]
            if use.by_purpose.get(purpose):
                ((start, end, nbytes),) = mine
                assert (start, nbytes) == (0.0, use.by_purpose[purpose])
                assert end == pytest.approx(step.seconds)


def test_activations_come_with_the_forward_and_go_with_the_backward() -> None:
    """Of one micro-batch kept on the GPU: most is in use where the forward ends."""
    plan = planned("resident")
    step = played(plan)
    kept = [lv for lv in step.levels if lv.purpose == "activations" and lv.tier is Tier.GPU]
    first, last = kept[0].nbytes, kept[-1].nbytes
    most = max(level.nbytes for level in kept)
    assert most == plan.predicted.memory[0].by_purpose["activations"]
    assert first < most > last


def test_levels_follow_each_other(plan: Plan) -> None:
    rows: dict[tuple[int, Tier, str], list[Level]] = defaultdict(list)
    step = played(plan)
    for level in step.levels:
        rows[level.stage, level.tier, level.purpose].append(level)
    for members in rows.values():
        assert members[0].start == 0.0
        assert members[-1].end == pytest.approx(step.seconds)
        assert all(a.end == b.start for a, b in itertools.pairwise(members))
