"""Which groups of a mixed cluster take part in a step."""

from dataclasses import replace

import pytest

from bigplan.engines import chosen, make_plan
from bigplan.errors import InfeasibleError
from bigplan.planner import Request
from bigplan.report.decision import decision, mixes_text
from bigplan.report.plan_json import plan_facts
from bigplan.report.stages import stages_of
from bigplan.solve.thresholds import WITHIN
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.mixed import choices
from bigplan.spec.training import Training
from tests.wording import tells

pytestmark = pytest.mark.usefixtures("first_plans")

TRAINING = Training(sequence_length=2048, global_batch=64)


def lab(*groups: tuple[str, int]) -> Cluster:
    found = [(find_cluster(name).group, name, nodes) for name, nodes in groups]
    return Cluster(
        name="lab",
        node_groups=tuple(g.model_copy(update={"name": n, "nodes": k}) for g, n, k in found),
    )


def request(cluster: Cluster, **settings: int) -> Request:
    return Request(find_model("llama-3-8b"), TRAINING, cluster, settings, "native", told=False)


@pytest.fixture(scope="module")
def mixed() -> Request:
    return request(lab(("dgx-h100", 1), ("dgx-a100-80g", 1), ("t4-cloud", 1)))


def test_the_fastest_choice_is_taken_and_all_are_told(mixed: Request) -> None:
    plan = make_plan(mixed)
    steps = {mix.groups: mix.step_seconds for mix in plan.search.mixes}
    assert len(steps) == len(choices(mixed.cluster))
    known = {groups: step for groups, step in steps.items() if step is not None}
    taken = tuple(member.name for member in plan.cluster.members or ())
    assert known[taken] == plan.predicted.step_seconds <= min(known.values()) * (1 + WITHIN)
    alone = next(c for c in choices(mixed.cluster) if c.group.name == "dgx-h100")
    assert known[("dgx-h100",)] == make_plan(replace(mixed, cluster=alone)).predicted.step_seconds
    assert steps[("t4-cloud",)] is None  # 60 times slower than an H100: not even searched
    text = decision(plan, stages_of(plan))
    assert tells(mixes_text(plan), "dgx-h100:", "t4-cloud: slower", f"Taken: {' + '.join(taken)}")
    shown = plan_facts(plan)["groups_tried"]
    assert [*dict.fromkeys(tuple(mix["groups"]) for mix in shown)] == list(steps)
    assert taken == ("dgx-h100", "dgx-a100-80g")
    assert tells(text, "1 of dgx-h100", "each group with work of its own")


def test_slow_nodes_are_left_out_where_they_cost_more_than_they_bring() -> None:
    plan = make_plan(request(lab(("dgx-h100", 1), ("l4-cloud", 1))))
    assert [member.name for member in plan.cluster.members or ()] == ["dgx-h100"]
    assert [member.name for member in plan.cluster.left_out or ()] == ["l4-cloud"]


def test_nodes_that_differ_in_memory_alone_work_together() -> None:
    plan = make_plan(request(lab(("dgx-a100-80g", 2), ("dgx-a100-40g", 2))))
    assert plan.cluster.group.nodes == 4
    assert plan.cluster.left_out is None
    assert plan.cluster.group.gpu.memory == find_cluster("dgx-a100-40g").group.gpu.memory
    assert tells(decision(plan, stages_of(plan)), "4 nodes (2 of", "and 2 of")
    fewer = plan.model_copy(update={"cluster": plan.cluster.with_nodes(3)})
    assert tells(decision(fewer, stages_of(fewer)), "3 nodes (among 2 of", "and 2 of")


def test_an_engine_is_chosen_for_the_groups_that_take_part() -> None:
    cluster = lab(("rtx-4090-workstation", 1), ("rtx-5090-workstation", 1))
    found = chosen(replace(request(cluster), engine="auto"))
    assert found.plan.search.mixes
    assert [m.name for m in found.plan.cluster.members or ()] == ["rtx-5090-workstation"]
    assert found.best.cluster == found.plan.cluster


def test_nothing_fits_any_group() -> None:
    cluster = lab(("t4-cloud", 1), ("a10g-cloud", 1)).with_caps(host=2**30, nvme=0)
    asked = replace(request(cluster), model=find_model("llama-3-70b"))
    with pytest.raises(InfeasibleError):  # though a T4 has no bf16 at all
        make_plan(asked)
