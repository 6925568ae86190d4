"""A plan's page: several stages, other engines, and what help is held against."""

from typing import Any

import pytest

from bigplan.engines import make_plan
from bigplan.page.help import Help
from bigplan.page.parts import Page
from bigplan.page.plan_page import plan_page
from bigplan.page.rivals import help_section, rivals_section
from bigplan.placement import Tier
from bigplan.plan import Plan, fullest
from bigplan.planner import Request
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from bigplan.whatif import Answer, Outcome
from tests.page.pages import rivalled
from tests.report.test_operators import planned
from tests.tiny import tiny_plan


def spec(page: Page, name: str) -> dict[str, Any]:
    charts = [chart for section in page.sections for chart in section.charts]
    return dict(next(chart.spec for chart in charts if chart.name == name))


def for_engine(engine: str) -> Plan:
    training = Training(sequence_length=256, global_batch=16)
    cluster = find_cluster("dgx-h100")
    return make_plan(Request(find_model("tiny-llama-demo"), training, cluster, engine=engine))


def test_stages_have_rows_of_their_own_and_a_menu() -> None:
    page = plan_page(planned("pipeline"))
    rows = {value["row"] for value in spec(page, "timeline")["data"]["values"]}
    assert {"0 · gpu compute", "1 · gpu compute"} <= rows
    memory = spec(page, "memory-gpu")
    assert memory["params"][0]["bind"]["options"] == [0, 1]
    assert {value["stage"] for value in memory["data"]["values"]} == {0, 1}


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_other_engines_have_a_path_and_no_operators(engine: str) -> None:
    plan = for_engine(engine)
    page = plan_page(plan)
    assert "Operators" not in [section.title for section in page.sections]
    bars = spec(page, "timeline")["data"]["values"]
    path = sum(bar["end"] - bar["start"] for bar in bars if bar.get("critical"))
    assert path == pytest.approx(plan.predicted.step_seconds, rel=1e-3)  # phases follow each other
    memory = spec(page, "memory-gpu")["data"]["values"]
    assert {value["at"] for value in memory} >= {0.0}


@pytest.mark.parametrize("engine", ["native", "deepspeed", "megatron"])
def test_runners_up_know_their_memory(engine: str) -> None:
    plan = for_engine(engine)
    assert plan.alternatives
    for other in plan.alternatives:
        assert 0 < other.memory[Tier.GPU] <= plan.cluster.group.gpu.memory
        host = other.memory.get(Tier.HOST, 0)
        assert host <= plan.cluster.group.host.memory


def test_the_plan_and_a_smaller_one_are_on_the_front() -> None:
    """The runner-up is slower and smaller, so neither beats the other; a third loses to both."""
    plan = rivalled(planned("resident"))
    (other,) = plan.alternatives
    worse = other.model_copy(
        update={
            "strategy": other.strategy.model_copy(update={"micro_batch": 2}),
            "step_seconds": 2 * other.step_seconds,
            "memory": fullest(plan.predicted.memory),
        }
    )
    plan = plan.model_copy(update={"alternatives": (other, worse)})
    (section,) = rivals_section(plan)
    values = section.charts[0].spec["data"]["values"]
    groups = [value["group"] for value in values]
    assert groups == ["taken", "unbeaten", "beaten"]
    assert all(value["dollars a step"].startswith("$") for value in values)


def test_an_older_plan_has_its_table_alone() -> None:
    plan = rivalled(tiny_plan())
    older = plan.alternatives[0].model_copy(update={"memory": {}})
    (section,) = rivals_section(plan.model_copy(update={"alternatives": (older,)}))
    assert section.charts == ()
    assert section.grids[0].rows


def test_help_is_held_against_a_free_plan() -> None:
    plan = tiny_plan()
    before = plan.predicted.step_seconds / 2
    faster = Outcome("twice the PCIe bandwidth", before, before / 2, "cpu")
    section = help_section(plan, Help(before, Answer((faster,), ())))
    assert "With every decision free" in section.lines[0]
    values = section.charts[0].spec["data"]["values"]
    assert [value["name"] for value in values] == ["as it is", "twice the PCIe bandwidth"]
    same = help_section(plan, Help(plan.predicted.step_seconds, Answer((), ())))
    assert same.lines == ("Nothing that could be changed holds this plan up.",)
