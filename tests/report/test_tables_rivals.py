import pytest

from bigplan.graph.strategy import Strategy
from bigplan.plan import Alternative, Plan, StepParts
from bigplan.report.tables import rivals_table, why_slower
from tests.report.shown import shown
from tests.tiny import tiny_plan

BEST = {"compute": 8.0, "recompute": 0.0, "collectives": 1.0, "update": 0.5, "bubble": 0.5}


def parts(**changes: float) -> StepParts:
    return StepParts(**{**BEST, "waiting": 0.0, **changes}, waits_for="nvme read")


def rival(**changes: float) -> Alternative:
    found = parts(**changes)
    seconds = sum(value for value in found.model_dump(exclude={"waits_for"}).values())
    return Alternative(strategy=Strategy(dp=2), step_seconds=seconds, parts=found)


@pytest.fixture
def plan() -> Plan:
    made = tiny_plan()
    predicted = made.predicted.model_copy(update={"step_seconds": 10.0, "parts": parts()})
    return made.model_copy(update={"predicted": predicted})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"recompute": 2.0}, "recomputation +2 s"),
        ({"bubble": 2.5}, "pipeline bubble +2 s"),
        ({"waiting": 3.0}, "waiting (nvme read is busiest) +3 s"),
        ({"collectives": 3.0, "compute": 9.0}, "collectives within layers +2 s, compute +1 s"),
        ({"recompute": 2.0, "bubble": 0.6}, "recomputation +2 s"),
        (
            {"recompute": 3.0, "collectives": 0.0},
            "recomputation +3 s, but collectives within layers -1 s",
        ),
        ({"waiting": 0.001}, "next to no difference"),
        ({"compute": 7.95}, "about as fast, but not as simple"),
    ],
)
def test_what_grows_most_is_why_it_lost(plan: Plan, changes: dict[str, float], why: str) -> None:
    assert why_slower(plan, rival(**changes)) == why


def test_the_table_says_by_how_much(plan: Plan) -> None:
    plan = plan.model_copy(update={"alternatives": (rival(recompute=2.0),)})
    text = shown(rivals_table(plan))
    assert "20.0%" in text
    assert "12 s" in text
    assert "data parallel 2" in text


def test_a_difference_that_rounds_to_nothing_has_no_sign(plan: Plan) -> None:
    plan = plan.model_copy(update={"alternatives": (rival(compute=7.999),)})
    text = shown(rivals_table(plan))
    assert " 0.0%" in text
    assert "-0.0%" not in text
