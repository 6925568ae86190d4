"""Unlike groups of nodes with micro-batches of sizes of their own."""

from dataclasses import replace
from itertools import product
from math import gcd
from pathlib import Path

import pytest

from bigplan.engines import chosen, make_plan
from bigplan.engines.unequal import planned, unequal_plan
from bigplan.errors import InfeasibleError, InputError, RefusedError
from bigplan.export import configuration
from bigplan.graph.strategy import Replicas
from bigplan.pace import group_steps
from bigplan.placement import Tier
from bigplan.plan import Plan, as_groups, digest, load_plan, save_plan
from bigplan.planner import Request
from bigplan.recheck import promised_again, recheck
from bigplan.report.decision import decision, mixes_text
from bigplan.report.explain import explain
from bigplan.report.plan_json import plan_facts
from bigplan.report.stages import stages_of
from bigplan.solve.search import unwatched
from bigplan.spec.cluster import Cluster, NodeGroup
from bigplan.spec.mixed import choices
from bigplan.spec.training import Training
from bigplan.spec.unequal import Sizes, most_ranks, together
from bigplan.whatif import what_would_help
from tests.engines.test_mixed import lab, request
from tests.wording import tells


def two_speeds(times: float, **nodes: int) -> Cluster:
    """DGX A100s, and such whose GPUs compute and move so many times as much a second."""
    old = lab(("dgx-a100-80g", nodes.get("old", 1))).group.model_copy(update={"name": "old"})
    peaks = {name: times * rate for name, rate in old.gpu.peak_flops.items()}
    faster = {"peak_flops": peaks, "memory_bandwidth": times * old.gpu.memory_bandwidth}
    gpu = old.gpu.model_copy(update={**faster, "name": "fast GPU"})
    new = {"name": "new", "gpu": gpu, "nodes": nodes.get("new", 1)}
    return Cluster(name="lab", node_groups=(old.model_copy(update=new), old))


def asked(cluster: Cluster, **training: int) -> Request:
    """By data parallelism alone: how work is shared out asks nothing about other splits."""
    found = request(cluster, tp=1, pp=1)
    changed = found.training.model_copy(update={"global_batch": 96, **training})
    return replace(found, training=changed)


def joined(found: Request) -> tuple[Request, tuple[NodeGroup, ...]]:
    """The request for all groups, and the groups."""
    return replace(found, cluster=choices(found.cluster)[-1]), found.cluster.node_groups


def unequal(found: Request) -> Plan:
    plan = unequal_plan(*joined(found), unwatched)
    assert plan is not None
    return plan


@pytest.fixture(scope="module")
def doubled() -> Plan:
    """Over one node of each, where the one is twice as fast; split in whichever way is best."""
    return make_plan(replace(asked(two_speeds(2.0)), settings={}))


def test_unequal_work_beats_equal_work_where_speeds_are_two_to_one(doubled: Plan) -> None:
    *alone, together, shared = doubled.search.mixes
    assert [mix.groups for mix in (together, shared)] == [("new", "old")] * 2
    assert (together.unequal, shared.unequal) == (False, True)
    assert together.step_seconds is not None
    assert shared.step_seconds == doubled.predicted.step_seconds
    # All but the collectives takes two thirds of the time: 3 of 3 parts rather than 2 of 2 slow.
    assert doubled.predicted.step_seconds < 0.75 * together.step_seconds
    known = [mix.step_seconds for mix in alone if mix.step_seconds is not None]
    assert doubled.predicted.step_seconds < 0.75 * min(known)
    first, second = doubled.strategy.replicas
    assert first.micro_batch == 2 * second.micro_batch
    assert shared.shares == pytest.approx((2 / 3, 1 / 3))


def test_each_group_is_promised_what_it_takes_by_itself(doubled: Plan) -> None:
    views, steps = as_groups(doubled), group_steps(doubled)
    whole = doubled.training.global_batch
    sequences = [view.training.global_batch // 2 for view in views]  # on half of the view's nodes
    assert sum(sequences) == whole
    for view, step in zip(views, steps, strict=True):
        assert promised_again(view).predicted.step_seconds == pytest.approx(step.alone)
        assert step.alone <= step.seconds <= doubled.predicted.step_seconds
    assert doubled.predicted.tokens_per_second == pytest.approx(
        doubled.training.tokens_per_step / doubled.predicted.step_seconds
    )
    uses = [promised_again(view).predicted.memory for view in views]
    for tier in (Tier.GPU, Tier.HOST):
        most = max(use.used_bytes for memory in uses for use in memory if use.tier is tier)
        assert most == max(use.used_bytes for use in doubled.predicted.memory if use.tier is tier)


def test_waits_at_collectives_make_a_step_longer_than_each_groups_work() -> None:
    """The fast group's attention is slow in forwards alone, where the other group waits for it."""
    cluster = two_speeds(2.0)
    new, old = cluster.node_groups
    slow = {k: 0.3 * share for k, share in old.gpu.attention_forward_efficiency.items()}
    gpu = new.gpu.model_copy(update={"attention_forward_efficiency": slow})
    groups = new.model_copy(update={"gpu": gpu}), old
    unlike = cluster.model_copy(update={"node_groups": groups})
    found = asked(unlike, sequence_length=8192, global_batch=24)
    plan = planned(*joined(found), (2, 1), unwatched)
    alone = [step.alone for step in group_steps(plan)]
    assert 1.01 * max(alone) < plan.predicted.step_seconds < 1.1 * max(alone)


def test_the_sizes_found_are_as_good_as_any() -> None:
    found = asked(two_speeds(3.0), global_batch=80)
    best = unequal(found).predicted.step_seconds
    whole, groups = joined(found)
    seconds = list(_every_step(whole, groups))
    assert len(seconds) > 5
    assert best <= min(seconds) * 1.01


def _every_step(whole: Request, groups: tuple[NodeGroup, ...]) -> list[float]:
    """Steps with all sizes up to eight that divide the batch."""
    steps = []
    for one, two in product(range(1, 9), repeat=2):
        sizes: Sizes = one, two
        if (
            one != two
            and gcd(one, two) == 1
            and 80 * most_ranks(groups) % together(groups, sizes) == 0
        ):
            try:
                steps.append(planned(whole, groups, sizes, unwatched).predicted.step_seconds)
            except (InfeasibleError, InputError):
                continue
    return steps


@pytest.mark.parametrize(("gib", "times"), [(80, 4), (20, 3)])
def test_memory_limits_the_larger_micro_batch(gib: int, times: int) -> None:
    cluster = two_speeds(4.0).with_caps(gpu=gib << 30, host=2**30, nvme=0)
    found = replace(asked(cluster, global_batch=80, sequence_length=16384), settings={})
    plan = unequal(found)
    first, second = plan.strategy.replicas
    assert first.micro_batch == times * second.micro_batch


def test_a_group_with_little_memory_is_held_to_its_own() -> None:
    cluster = two_speeds(2.0)
    new, old = cluster.node_groups
    small = old.model_copy(update={"gpu": old.gpu.limited("memory", 40 << 30)})
    plan = unequal(asked(cluster.model_copy(update={"node_groups": (new, small)})))
    for view, step in zip(as_groups(plan), group_steps(plan), strict=True):
        memory = promised_again(view).predicted.memory
        assert all(use.used_bytes <= use.capacity_bytes for use in memory)
        assert step.workload.nodes.gpu.memory == view.cluster.group.gpu.memory
    # With less memory than its smaller micro-batch needs, the plan is not offered.
    tiny = [m.figures for m in plan.cluster.members or ()][1]
    assert tiny is not None
    less = tiny.model_copy(update={"gpu": tiny.gpu.limited("memory", 12 << 30)})
    members = plan.cluster.members or ()
    members = members[0], members[1].model_copy(update={"figures": less})
    short = plan.cluster.model_copy(update={"members": members})
    with pytest.raises(InputError, match=r"needs .* of gpu memory per GPU"):
        promised_again(plan.model_copy(update={"cluster": short}))


def test_a_batch_that_does_not_divide_is_shared_out_equally() -> None:
    plan = make_plan(replace(asked(two_speeds(2.0), global_batch=2), settings={}))
    assert not plan.strategy.replicas
    assert not any(mix.unequal for mix in plan.search.mixes)


def test_every_stage_of_a_replica_fills_nodes_of_its_group() -> None:
    found = asked(two_speeds(2.0, new=2, old=2))
    plan = planned(*joined(replace(found, settings={"pp": 2})), (2, 1), unwatched)
    assert [group.number for group in plan.strategy.replicas] == [8, 8]
    odd = asked(two_speeds(2.0, new=2, old=3), global_batch=112)
    with pytest.raises(InputError, match="no way to split"):
        planned(*joined(replace(odd, settings={"pp": 2})), (2, 1), unwatched)


def test_other_engines_share_work_out_equally() -> None:
    found = replace(asked(two_speeds(2.0)), engine="megatron")
    plan = make_plan(found)
    assert not plan.strategy.replicas
    assert not any(mix.unequal for mix in plan.search.mixes)


def test_an_engine_is_chosen_with_unequal_work() -> None:
    found = chosen(replace(asked(two_speeds(2.0)), engine="auto"))
    assert found.plan.strategy.replicas
    assert found.by_engine["native"] == found.plan


def test_what_is_told_of_it(doubled: Plan) -> None:
    text = decision(doubled, stages_of(doubled))
    assert tells(text, "2 nodes (1 of new and 1 of old; each group with work of its own)")
    first, second = (group.micro_batch for group in doubled.strategy.replicas)
    assert tells(text, f"micro-batch {first} and {second}")
    told = mixes_text(doubled)
    assert tells(told, f"micro-batches of {first} sequences (67%) and", "(33%)")
    assert tells(
        told, "Taken: new + old with unequal work: without waiting for each other, new takes"
    )
    shown = plan_facts(doubled)["groups_tried"][-1]
    assert shown["micro_batches"] == [first, second]
    assert shown["shares"] == pytest.approx([2 / 3, 1 / 3])
    assert "micro_batches" not in plan_facts(doubled)["groups_tried"][0]
    explained = explain(doubled)
    assert "which paces the step" in explained.headline
    layers = [row for row in explained.rows if row.of_layers]
    pace = max(group_steps(doubled), key=lambda step: step.seconds)
    assert sum(row.seconds for row in layers) == pytest.approx(
        doubled.predicted.busy_seconds["gpu compute"], rel=0.1
    )
    assert pace.view.cluster.group.name in explained.headline


def test_other_tools_have_one_size_for_all(doubled: Plan) -> None:
    with pytest.raises(RefusedError, match="plan with --engine megatron"):
        configuration(doubled, "megatron")


def test_a_plan_that_is_read_is_checked(doubled: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(doubled, path)
    assert recheck(load_plan(path), path).note == ""
    assert load_plan(path) == doubled
    first, second = doubled.strategy.replicas
    other = (Replicas(number=12, micro_batch=first.micro_batch), second)
    moved = doubled.strategy.model_copy(update={"replicas": other, "dp": 12 + second.number})
    with pytest.raises(InputError, match=r"strategy\.replicas: groups of .* GPUs; the plan's"):
        recheck(doubled.model_copy(update={"strategy": moved}), path)
    larger = Training.model_validate(doubled.training.model_dump() | {"global_batch": 100})
    with pytest.raises(InputError, match="must divide the global batch of 100"):
        recheck(doubled.model_copy(update={"training": larger}), path)
    path.write_text(path.read_text().replace("number: 8", "number: 7"))
    with pytest.raises(InputError, match="replicas: 14 with micro-batches of"):
        load_plan(path)


def test_what_would_help_of_groups_with_work_of_their_own(doubled: Plan) -> None:
    found = replace(asked(two_speeds(2.0)), cluster=doubled.cluster)
    again = make_plan(found)
    assert again.predicted.step_seconds == pytest.approx(doubled.predicted.step_seconds)
    assert [mix.groups for mix in again.search.mixes] == [("new", "old")] * 2
    answer = what_would_help(found, doubled)
    changes = [outcome.change for outcome in answer.outcomes]
    assert "one more node of new (24 GPUs)" in changes


def test_plans_with_equal_work_are_written_as_ever() -> None:
    plan = make_plan(asked(two_speeds(1.0)))
    assert not plan.strategy.replicas
    for written in (plan.model_dump(mode="json"), plan.model_dump()):
        assert "replicas" not in written["strategy"]
        assert all("figures" not in member for member in written["cluster"]["members"] or ())
        for mix in written["search"]["mixes"]:
            assert not mix.keys() & {"unequal", "micro_batches", "shares"}
    assert digest(plan.strategy) == digest(type(plan.strategy)(**dict(plan.strategy)))


def test_on_fewer_nodes_all_count_as_the_worst(doubled: Plan) -> None:
    """A run that lost a node does not know of which group the others are."""
    assert doubled.cluster.with_nodes(2) == doubled.cluster
    fewer = doubled.cluster.with_nodes(1)
    assert [member.figures for member in fewer.members or ()] == [None, None]
    plan = make_plan(replace(asked(two_speeds(2.0)), cluster=fewer))
    assert not plan.strategy.replicas
    assert plan.cluster.gpus == 8
