"""Frameworks as engines: they plan what the tool can do, at the closed formulas' price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bigplan.cli.app import app
from bigplan.cost.memory import framework_memory
from bigplan.cost.run import graph_of, parts_of
from bigplan.engines import ENGINES, chosen, engine_of, make_plan
from bigplan.engines.frameworks import FRAMEWORKS
from bigplan.engines.frameworks.search import FrameworkSearch
from bigplan.engines.frameworks.way import Way
from bigplan.errors import InfeasibleError, InputError, RefusedError
from bigplan.export import TOOLS
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan, load_plan, save_plan
from bigplan.planner import Request, simulate_plan
from bigplan.runnable import best_runnable
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.engines.deepspeed.test_search import Settings

EIGHT, ONE = find_cluster("hgx-h200"), find_cluster("h200-1x")
SMALL = Training(sequence_length=4096, global_batch=16)
CASES: dict[str, Request] = {
    "eight": Request(find_model("llama-3-8b"), SMALL, EIGHT),
    "nodes": Request(find_model("llama-3-70b"), SMALL, EIGHT.with_nodes(2)),
    "tight": Request(find_model("llama-like-5.5b"), SMALL, EIGHT.with_caps(gpu=24 << 30)),
    "alone": Request(find_model("llama-like-5.5b"), SMALL, ONE),
    "away": Request(find_model("llama-like-5.5b"), SMALL, ONE.with_caps(gpu=40 << 30)),
}


def asked(case: str, engine: str, settings: Settings | None = None) -> Request:
    return replace(CASES[case], engine=engine, settings=settings or {})


@pytest.fixture(scope="module", params=FRAMEWORKS)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def plans(engine: str) -> dict[str, Plan]:
    found = {}
    for case, wanted in CASES.items():
        try:
            found[case] = make_plan(asked(case, engine))
        except InfeasibleError:
            assert case in ("away", "alone") or wanted.cluster.gpus > 8, case
    assert found
    return found


def test_a_plan_for_a_tool_loses_nothing_in_its_configuration(
    engine: str, plans: dict[str, Plan]
) -> None:
    for case, plan in plans.items():
        assert TOOLS[engine](plan).lost == (), case


def test_so_does_one_with_everything_that_is_open_for_it(
    engine: str, plans: dict[str, Plan]
) -> None:
    search = FrameworkSearch(FRAMEWORKS[engine].tool, asked("tight", engine))
    seen = set()
    for strategy in search._strategies():
        for home in search.tool.homes(strategy):
            for count in (0, *search.tool.counts(search.request.model, strategy)):
                policy = Recompute.FULL if count else Recompute.NONE
                way = replace(home, policy=policy, again=count)
                changes = {
                    "strategy": way.strategy,
                    "placement": way.placement(plans["tight"].model, plans["tight"].training),
                }
                plan = plans["tight"].model_copy(update=changes)  # whose promise nobody looks at
                assert Way.of(plan) == way
                assert TOOLS[engine](plan).lost == (), way
                seen.add((bool(count), bool(home.on_cpu)))
    assert len(seen) >= (2 if engine == "nemo" else 3)


DEEPSEEK_LITE = Request(find_model("deepseek-v2-lite"), SMALL, EIGHT, engine="megatron")


def test_megatron_is_told_of_latent_attention_and_of_blocks_without_experts() -> None:
    plan = make_plan(DEEPSEEK_LITE)
    written = TOOLS["megatron"](plan)
    assert written.lost == ()
    script = written.files["megatron.sh"]
    for told in (
        "--multi-latent-attention --qk-layernorm",
        "--kv-lora-rank 512 --qk-head-dim 128",
        "--qk-pos-emb-head-dim 64 --v-head-dim 128",
        "--rope-type yarn --rotary-scaling-factor 40.0",
        "--ffn-hidden-size 10944",
        "--moe-ffn-hidden-size 1408",
        '--moe-layer-freq "([0]*1+[1]*26)"',
        "--moe-shared-expert-intermediate-size 2816",
    ):
        assert told in script
    assert "--q-lora-rank" not in script  # queries are made of the stream
    assert "--kv-channels" not in script


def test_megatron_is_told_of_blocks_without_experts_in_turns() -> None:
    changes = {"dense_blocks": 0, "expert_pattern": ("2 dense", "1 routed"), "layers": 7}
    model = DEEPSEEK_LITE.model.model_copy(update=changes)
    plan = make_plan(Request(model, SMALL, EIGHT, engine="megatron"))
    script = TOOLS["megatron"](plan).files["megatron.sh"]
    assert '--moe-layer-freq "([0]*2+[1]*1+[0]*2+[1]*1+[0]*1)"' in script


def test_first_blocks_are_placed_and_recomputed_where_they_are() -> None:
    """Chunks 0 and 2 on the first of two stages; of each, one block runs again."""
    model = DEEPSEEK_LITE.model.model_copy(update={"layers": 8})
    strategy = Strategy(dp=4, pp=2, vpp=2, zero=1)
    way = Way(strategy, Recompute.FULL, again=1)
    assert list(way.blocks(model)) == [
        {("dense", True): 1, ("block", False): 2, ("block", True): 1},
        {("block", True): 2, ("block", False): 2},
    ]
    first, second = way.placement(model, SMALL).stages
    assert {name: kind.layers for name, kind in first.kinds.items()} == {
        "dense": 1,
        "block": 3,
        "embedding": 1,
    }
    assert {name: kind.layers for name, kind in second.kinds.items()} == {"block": 4, "head": 1}
    assert first.blocks.layers == 4
    assert first.blocks.activations == {
        Recompute.NONE: {Tier.GPU: 2},
        Recompute.FULL: {Tier.GPU: 2},
    }
    assert way.execution(model).recomputed == 4 / 8


@pytest.mark.parametrize(
    "changed", [{"original_length": 8192}, {"beta_fast": 16.0}, {"mscale_all_dim": None}]
)
def test_other_angles_than_those_of_megatron_are_refused(changed: dict[str, object]) -> None:
    model = DEEPSEEK_LITE.model
    assert model.rope_scaling is not None
    scaling = model.rope_scaling.model_copy(update=changed)
    request = replace(DEEPSEEK_LITE, model=model.model_copy(update={"rope_scaling": scaling}))
    with pytest.raises(InputError, match="no yarn scaling of rotary angles for Megatron-LM"):
        make_plan(request)


def test_the_price_is_that_of_published_runs(engine: str, plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        request = Request(plan.model, plan.training, plan.cluster, engine=engine)
        run = FrameworkSearch(FRAMEWORKS[engine].tool, request).priced(Way.of(plan)).run
        graph = graph_of(run)
        seconds = sum(parts_of(run, graph, run.nodes).values())
        assert plan.predicted.step_seconds == pytest.approx(seconds, rel=1e-9)
        peak = sum(framework_memory(graph, run.execution, run.framework, "reserved").values())
        on_gpu = [use.used_bytes for use in plan.predicted.memory if use.tier is Tier.GPU]
        assert max(on_gpu) == pytest.approx(peak, rel=1e-6)
        parts = plan.predicted.parts.model_dump(exclude={"waits_for"})
        assert sum(parts.values()) == pytest.approx(seconds)


def test_no_plan_needs_more_than_there_is(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        for use in plan.predicted.memory:
            assert use.used_bytes <= use.capacity_bytes


def test_a_plan_is_rechecked_and_no_other_placement_taken(
    engine: str, plans: dict[str, Plan], tmp_path: Path
) -> None:
    plan = next(iter(plans.values()))
    path = tmp_path / "plan.yaml"
    save_plan(plan, path)
    read = load_plan(path)
    assert engine_of(read).recheck(read, path).plan == plan
    promised = read.predicted.model_copy(update={"step_seconds": 1e-3})
    lying = read.model_copy(update={"predicted": promised})
    again = engine_of(lying).recheck(lying, path)
    assert again.plan == plan
    assert "computed again" in again.note
    stage = plan.placement.stages[0]
    kinds = {**stage.kinds}
    block = kinds["block"]
    kinds["block"] = block.model_copy(
        update={"activations": {Recompute.SELECTIVE: {Tier.GPU: block.layers}}}
    )
    stages = (stage.model_copy(update={"kinds": kinds}), *plan.placement.stages[1:])
    placement = plan.placement.model_copy(update={"stages": stages})
    with pytest.raises(InputError, match="placement"):
        engine_of(plan).recheck(plan.model_copy(update={"placement": placement}), path)


def test_it_is_refused_where_it_would_run_and_named_what_to_do(
    engine: str, plans: dict[str, Plan], tmp_path: Path
) -> None:
    plan = next(iter(plans.values()))
    path = tmp_path / "plan.yaml"
    save_plan(plan, path)
    told = CliRunner().invoke(app, ["launch", str(path)])
    assert isinstance(told.exception, RefusedError)
    assert f"bigplan config PLAN --for {engine}" in str(told.exception)
    with pytest.raises(RefusedError, match="no program"):
        simulate_plan(plan)
    timeline = engine_of(plan).timeline(plan)
    assert timeline.seconds == pytest.approx(plan.predicted.step_seconds)
    found = best_runnable(asked("eight", engine), plan)
    assert found.plan is None
    assert engine in found.refusal


def test_auto_looks_at_none_of_them() -> None:
    assert not set(ENGINES) & set(FRAMEWORKS)
    request = Request(find_model("llama-3-8b"), SMALL, EIGHT, engine="auto")
    assert set(chosen(request).by_engine) <= set(ENGINES)


def test_decisions_are_fixed_with_set_or_refused() -> None:
    plan = make_plan(asked("eight", "megatron", {"tp": 4, "pp": 2, "recompute.full": 3}))
    assert plan.strategy.tp == 4
    assert plan.placement.stages[1].kinds["block"].activations[Recompute.FULL] == {Tier.GPU: 3}
    half = make_plan(asked("eight", "megatron", {"optimizer.host": 0.5, "zero": 1}))
    assert half.placement.stages[0].kinds["block"].optimizer[Tier.HOST] == 16
    with pytest.raises(InputError, match="what is open"):
        make_plan(asked("eight", "megatron", {"activations": "host"}))
    with pytest.raises(InputError, match="torchtitan shards gradients as well"):
        make_plan(asked("eight", "torchtitan", {"zero": 1}))
    with pytest.raises(InfeasibleError, match="short at least"):
        make_plan(asked("alone", "nemo", {"recompute": "none", "micro_batch": 16}))


def test_what_a_tool_does_not_train_is_refused() -> None:
    low = SMALL.model_copy(update={"gradient_precision": "bf16"})
    with pytest.raises(RefusedError, match="reduces gradients in fp32"):
        make_plan(replace(asked("eight", "torchtitan"), training=low))
    bloom = replace(asked("eight", "megatron"), model=find_model("bloom-176b"))
    with pytest.raises(RefusedError, match="no linear biases"):
        make_plan(bloom)


def test_less_memory_is_never_faster(engine: str, plans: dict[str, Plan]) -> None:
    roomy = plans["eight"].predicted.step_seconds
    less = replace(asked("eight", engine), cluster=EIGHT.with_caps(gpu=48 << 30))
    assert make_plan(less).predicted.step_seconds >= roomy - 1e-9


# FSDP2 with CPUOffloadPolicy, measured (benchmarks/results/2026-11-22-h200-rows-apart): seconds of
# a step of 16 sequences in micro-batches of 4, all blocks recomputed, and bytes of host memory.
MEASURED = {"llama-like-5.5b": (49.66, 95.4e9), "llama-like-3.3b": (35.99, 58.3e9)}


@pytest.mark.parametrize("name", MEASURED)
def test_what_leaves_the_gpu_takes_the_time_and_host_memory_that_it_took(name: str) -> None:
    settings: Settings = {"parameters": "host", "micro_batch": 4, "recompute": "full"}
    request = replace(asked("alone", "fsdp2", settings), model=find_model(name))
    predicted = make_plan(request).predicted
    seconds, nbytes = MEASURED[name]
    host = next(use for use in predicted.memory if use.tier is Tier.HOST)
    assert predicted.step_seconds == pytest.approx(seconds, rel=0.1)
    assert host.used_bytes == pytest.approx(nbytes, rel=0.1)


def test_strategies_that_a_tool_does_not_have() -> None:
    model = find_model("llama-3-8b")
    refused = {
        "megatron": Strategy(dp=2, pp=2, zero=2),
        "nemo": Strategy(dp=8, zero=3),
        "fsdp2": Strategy(dp=4, tp=2, zero=3),
        "accelerate": Strategy(dp=8, zero=1),
        "torchtitan": Strategy(dp=4, tp=2, zero=2, sequence_parallel=False),
    }
    for name, strategy in refused.items():
        assert FRAMEWORKS[name].tool.refusal(model, SMALL, strategy), name
        alone = Strategy(dp=1)
        assert FRAMEWORKS[name].tool.refusal(model, SMALL, alone) is None
