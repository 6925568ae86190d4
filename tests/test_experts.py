"""Models with experts from end to end of the planner: plans, what they tell, what refuses them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigplan.cli.app import app
from bigplan.engines import ENGINES, make_plan
from bigplan.engines.frameworks import FRAMEWORKS
from bigplan.errors import InputError, RefusedError
from bigplan.export import TOOLS, configuration
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier, may_capture
from bigplan.plan import Plan, graph_of
from bigplan.planner import Request
from bigplan.recheck import recheck
from bigplan.report.decision import decision
from bigplan.report.stages import stages_of
from bigplan.solve.candidate import Candidate, Workload
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.lora import Lora
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from tests.export.test_tools import MEGATRON

SMALL = find_model("qwen3-0.6b")
# The dense model's matrices for a token, split over 4 of 16 experts.
ROUTED = ModelSpec.model_validate(
    SMALL.model_dump()
    | {"name": "routed", "ffn": SMALL.ffn // 4, "experts": 16, "experts_per_token": 4}
)
TRAINING = Training(sequence_length=1024, global_batch=16)


@cache
def planned(model: ModelSpec, cluster: str = "h200-1x") -> Plan:
    return make_plan(Request(model, TRAINING, find_cluster(cluster), engine="native"))


def test_a_plan_is_slower_than_that_of_a_dense_model_of_equal_flops() -> None:
    """It computes as much, and has three times as many parameters of experts to update besides."""
    dense, routed = planned(SMALL).predicted, planned(ROUTED).predicted
    assert ROUTED.parameter_count > 2 * SMALL.parameter_count
    assert ROUTED.active_parameter_count == pytest.approx(SMALL.parameter_count, rel=0.01)
    assert 1.1 < routed.step_seconds / dense.step_seconds < 3
    assert routed.mfu * routed.step_seconds == pytest.approx(
        dense.mfu * dense.step_seconds, rel=0.02
    )


def test_a_plan_tells_the_parameters_that_a_token_passes() -> None:
    for model, told in ((ROUTED, "parameters, 596.5 M for a token)"), (SMALL, "parameters) on")):
        plan = planned(model)
        assert told in decision(plan, stages_of(plan))


def test_passes_are_captured_only_where_nothing_waits() -> None:
    for cluster, captured in (("h200-1x", True), ("rtx-4090-workstation", False)):
        workload = Workload(ROUTED, TRAINING, find_cluster(cluster).group)
        candidate = Candidate.of(workload, Strategy(dp=1))
        assert candidate.costs.captures == captured
    plan = planned(ROUTED, "rtx-4090-workstation")
    assert not may_capture(graph_of(plan), plan.placement)


OTHERS = sorted({"deepspeed", *FRAMEWORKS} - {"megatron"})


@pytest.mark.parametrize("engine", OTHERS)
def test_other_engines_refuse_experts(engine: str) -> None:
    asked = Request(ROUTED, TRAINING, find_cluster("h200-1x"), engine=engine)
    with pytest.raises(RefusedError, match="routed has 16 experts; plan with --engine nat"):
        make_plan(asked)
    if engine in ENGINES:
        assert "16 experts" in str(ENGINES[engine].refusal(ROUTED, TRAINING, Strategy(dp=1)))


@pytest.mark.parametrize("tool", sorted({*TOOLS} - {"megatron"}))
def test_nothing_is_written_for_other_tools(tool: str) -> None:
    with pytest.raises(RefusedError, match=f"for Megatron-LM alone, not for {tool}: routed has 16"):
        configuration(planned(ROUTED), tool)


@pytest.mark.parametrize("engine", ["native", "any", "megatron", *OTHERS])
def test_experts_that_are_not_there_are_not_spread(engine: str) -> None:
    asked = Request(SMALL, TRAINING, find_cluster("hgx-h200"), {"ep": 2}, engine)
    with pytest.raises(RefusedError, match=r"ep 2: qwen3-0.6b has no experts.*leave ep out"):
        make_plan(asked)


@pytest.mark.parametrize("engine", OTHERS)
def test_other_engines_do_not_spread_experts(engine: str) -> None:
    asked = Request(ROUTED, TRAINING, find_cluster("hgx-h200"), {"ep": 2}, engine)
    with pytest.raises(RefusedError, match=r"experts .* own runtime and for Megatron-LM alone"):
        make_plan(asked)


@cache
def spread(**settings: int) -> Plan:
    asked = Request(ROUTED, TRAINING, find_cluster("hgx-h200"), settings, engine="native")
    return make_plan(asked)


@pytest.mark.parametrize("settings", [{}, {"tp": 2}, {"cp": 2}])
def test_a_plan_spreads_experts_over_ranks_where_that_is_wanted(
    tmp_path: Path, settings: dict[str, int]
) -> None:
    plan = spread(ep=4, **settings)
    assert plan.strategy.ep == 4
    assert {name: getattr(plan.strategy, name) for name in settings} == settings
    assert "expert parallel 4" in decision(plan, stages_of(plan))
    assert not plan.placement.captured
    recheck(plan, tmp_path / "plan.yaml")


def test_a_free_plan_is_no_slower_than_one_with_experts_on_so_many_ranks() -> None:
    """But for what the search gives up for a simpler plan."""
    free = planned(ROUTED, "hgx-h200").predicted.step_seconds
    assert free <= 1.02 * min(spread(ep=ep).predicted.step_seconds for ep in (1, 2, 8))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"ep": 3}, "ep 3 does not divide the 16 experts of routed"),
        ({"ep": 8, "dp": 4}, "ep 8 does not divide dp 4"),
        ({"ep": 8, "dp": 2, "cp": 2}, "ep 8 does not divide dp 2 x cp 2"),
    ],
)
def test_what_does_not_go_with_spread_experts_is_refused(
    settings: dict[str, int], told: str
) -> None:
    with pytest.raises(RefusedError, match=told):
        spread(**settings)


def test_frozen_experts_are_spread_with_adapters_of_theirs() -> None:
    """A rank has those of its experts, and sums fewer gradients."""

    def asked(ep: int, *targets: str) -> Plan:
        training = TRAINING.model_copy(update={"lora": Lora(rank=4, targets=targets)})
        machine = find_cluster("hgx-h200")
        return make_plan(Request(ROUTED, training, machine, {"ep": ep}, engine="native"))

    assert asked(2, "q_proj").strategy.ep == 2
    whole, some = (asked(ep, "q_proj", "experts.up_proj") for ep in (1, 2))
    of_one, of_two = (graph_of(found).adapters(range(3)) for found in (whole, some))
    experts = sum(tensor.elements for _, tensor in of_one.tensors if tensor.experts)
    assert (of_one.whole_experts, of_two.whole_experts) == (0, experts // 2)
    assert of_one.elements - of_two.elements == experts // 2


def test_a_plan_file_with_a_split_that_spreads_no_experts_is_refused(tmp_path: Path) -> None:
    plan = spread(ep=4)
    for changes, told in (({"ep": 3}, "ep 3 does not divide"), ({"ep": 16}, "ep 16 does not")):
        strategy = plan.strategy.model_copy(update=changes)
        with pytest.raises(InputError, match=f"strategy.{told}"):
            recheck(plan.model_copy(update={"strategy": strategy}), tmp_path / "plan.yaml")


def test_what_varies_with_the_routing_does_not_leave_the_gpu(tmp_path: Path) -> None:
    """A plan file that says otherwise is refused."""
    plan = spread(ep=4)
    (stage,) = plan.placement.stages
    blocks = stage.kinds["block"]
    away = blocks.model_copy(update={"activations": {Recompute.NONE: {Tier.HOST: blocks.layers}}})
    kinds = {**stage.kinds, "block": away}
    stages = (stage.model_copy(update={"kinds": kinds}),)
    placement = plan.placement.model_copy(update={"stages": stages})
    with pytest.raises(InputError, match=r"block\.activations"):
        recheck(plan.model_copy(update={"placement": placement}), tmp_path / "plan.yaml")


@cache
def by_megatron(ep: int | None = None, model: ModelSpec = ROUTED) -> Plan:
    settings = {} if ep is None else {"ep": ep}
    cluster = find_cluster("hgx-h200")
    return make_plan(Request(model, TRAINING, cluster, settings, engine="megatron"))


def test_megatron_is_planned_with_the_best_number_of_ranks_for_experts() -> None:
    free = by_megatron()
    assert free.predicted.step_seconds == min(
        by_megatron(ep).predicted.step_seconds for ep in (1, 2, 4, 8)
    )
    told = by_megatron(4)
    assert told.strategy.ep == 4
    assert "expert parallel 4" in decision(told, stages_of(told))
    with pytest.raises(InputError, match=r"satisfies ep=3.*ep the experts and dp x tp"):
        by_megatron(3)


def test_what_megatron_is_told_of_experts() -> None:
    """Weights of choices that sum to 1 are a softmax of the chosen scores, Megatron-LM's default.

    Its balancing loss is a k-th of this project's in every block, and blocks add theirs up.
    """
    balanced = {"router_loss": 0.01, "router_normalised": False, "name": "balanced"}
    for model, loss in ((ROUTED, "none"), (ROUTED.model_copy(update=balanced), "aux_loss")):
        script = configuration(by_megatron(4, model), "megatron").files["megatron.sh"]
        options = {line[2:].partition(" ")[0] for line in script.split() if line.startswith("--")}
        for told in (
            "--num-experts 16 --moe-router-topk 4",
            f"--moe-ffn-hidden-size {ROUTED.ffn}",
            "--expert-model-parallel-size 4",
            "--expert-tensor-parallel-size 1",
            f"--moe-router-load-balancing-type {loss}",
            "--moe-token-dispatcher-type alltoall",
            "--moe-grouped-gemm --moe-permute-fusion",
        ):
            assert told in script
        assert options - {"nnodes", "nproc-per-node"} <= MEGATRON
        assert ("--moe-router-pre-softmax" in script) == (model.name == "balanced")
    assert f"--moe-aux-loss-coeff {0.01 * 4 / ROUTED.layers:.6g} " in script


def test_a_native_plan_splits_experts_by_tensor_parallelism_in_megatron_too() -> None:
    request = Request(ROUTED, TRAINING, find_cluster("hgx-h200"), {"tp": 2}, engine="native")
    script = configuration(make_plan(request), "megatron").files["megatron.sh"]
    assert "--expert-model-parallel-size 1 " in script
    assert "--expert-tensor-parallel-size 2 " in script


def test_files_of_other_tools_are_not_priced_with_experts(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}')
    given = ["--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--seq-len", "4096"]
    found = CliRunner().invoke(app, ["import", str(file), "--from", "deepspeed", *given])
    assert isinstance(found.exception, RefusedError)
    assert "mixtral-8x7b has 8 experts" in " ".join(str(found.exception).split())


def test_experts_in_fp8_are_planned_where_they_run() -> None:
    """By the native runtime, on GPUs for which torch has a kernel; narrow experts gain nothing."""
    low = TRAINING.model_copy(update={"fp8_gemms": True})
    asked = Request(ROUTED, low, find_cluster("h200-1x"), engine="native")
    plan = make_plan(asked)
    assert plan.executable["native"] is True
    plain = planned(ROUTED).predicted.step_seconds
    assert plan.predicted.step_seconds == pytest.approx(plain, rel=0.02)
    wide = find_model("gpt-oss-20b").model_copy(update={"layers": 4})
    faster = make_plan(replace(asked, model=wide)).predicted.step_seconds
    assert faster < 0.95 * planned(wide).predicted.step_seconds
    for engine in ("deepspeed", "megatron"):
        with pytest.raises(RefusedError, match="plans experts in fp8 for its own runtime alone"):
            make_plan(replace(asked, engine=engine))
    elsewhere = replace(asked, cluster=find_cluster("hgx-b200"))
    with pytest.raises(RefusedError, match="run on compute capability 9 alone"):
        make_plan(elsewhere)


# Half of the experts' matrices for a token are shared; the first block has none of them.
BESIDE = ModelSpec.model_validate(
    ROUTED.model_dump()
    | {"name": "beside", "experts_per_token": 2, "shared_ffn": SMALL.ffn // 2, "dense_blocks": 2}
    | {"dense_ffn": SMALL.ffn, "routing": {"scores": "sigmoid", "bias": True}}
)


def test_a_plan_with_shared_experts_and_dense_blocks_counts_what_a_token_passes() -> None:
    """As many FLOPs a token as the dense model; the idle experts of two blocks fewer."""
    routed, beside = planned(ROUTED), planned(BESIDE)
    assert BESIDE.active_parameter_count == pytest.approx(SMALL.parameter_count, rel=0.01)
    assert beside.predicted.step_seconds < routed.predicted.step_seconds
    useful = [plan.predicted.mfu * plan.predicted.step_seconds for plan in (routed, beside)]
    assert useful[0] == pytest.approx(useful[1], rel=0.02)
    kinds = beside.placement.stages[0].kinds
    assert {name: kind.layers for name, kind in kinds.items()} == {
        "embedding": 1,
        "dense": 2,
        "block": BESIDE.layers - 2,
        "head": 1,
    }


@pytest.mark.parametrize("stages", [2, 4])
def test_dense_blocks_are_on_the_first_stages(stages: int, tmp_path: Path) -> None:
    """Of which one may have nothing else between its ends."""
    model = BESIDE.model_copy(update={"dense_blocks": 7})
    cluster = find_cluster("hgx-h200")
    plan = make_plan(Request(model, TRAINING, cluster, {"pp": stages}, engine="native"))
    dense = [
        stage.kinds["dense"].layers for stage in plan.placement.stages if "dense" in stage.kinds
    ]
    assert sum(dense) == 7
    assert ("block" in plan.placement.stages[0].kinds) == (stages == 2)
    assert len(dense) == (1 if stages == 2 else 2 if dense[0] < 7 else 1)
    assert recheck(plan, tmp_path / "plan.yaml").plan.placement == plan.placement


IN_TURNS = ModelSpec.model_validate(
    SMALL.model_dump()
    | {"name": "in turns", "delta_rule": {"key_heads": 8, "value_heads": 16}}
    | {"mixer_pattern": ["3 delta_rule", "1 attention"]}
)


@pytest.mark.parametrize("model", [BESIDE, IN_TURNS], ids=["dense", "mixers"])
def test_virtual_stages_may_have_unlike_blocks(model: ModelSpec, tmp_path: Path) -> None:
    asked = Request(model, TRAINING, find_cluster("hgx-h200"), {"pp": 2, "vpp": 2}, "native")
    plan = make_plan(asked)
    graph = graph_of(plan)
    assert plan.strategy.vpp == 2
    of_first = [Counter(graph.layers[i] for i in graph.chunk_layers(c)) for c in (0, 2)]
    assert of_first[0] - Counter(["embedding"]) != of_first[1]
    assert recheck(plan, tmp_path / "plan.yaml").plan.placement == plan.placement


def test_shared_experts_are_planned_for_megatron_and_refused_for_others() -> None:
    asked = Request(BESIDE, TRAINING, find_cluster("hgx-h200"), engine="megatron")
    plan = make_plan(asked)
    first = plan.placement.stages[0].kinds
    assert first["dense"].layers == BESIDE.dense_blocks
    with pytest.raises(
        RefusedError, match=r"beside has 16 experts; plan with --engine na.*e or megatron$"
    ):
        make_plan(replace(asked, engine="deepspeed"))
    capped = replace(asked, model=BESIDE.model_copy(update={"score_scale": 0.1}))
    told = "plans models with score_scale for its own runtime alone, not for megatron"
    with pytest.raises(RefusedError, match=told):
        make_plan(capped)
