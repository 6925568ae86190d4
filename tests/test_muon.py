"""Muon, planned: bytes of state, FLOPs and seconds of directions, refusals, advice."""

from __future__ import annotations

from functools import cache

import pytest
from pydantic import ValidationError

from bigplan.capabilities.other_tools import other_tools_refusal
from bigplan.capabilities.splits import muon_refusal
from bigplan.cost import price
from bigplan.errors import InputError, RefusedError
from bigplan.graph.build import build_graph, element_sizes
from bigplan.graph.muon import parts, products, touched, workspace
from bigplan.graph.operators import Gemm
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.planner import Request, make_plan
from bigplan.ranks import Coordinates, GroupName, communicating, members
from bigplan.report.advice import advice_of
from bigplan.report.operators import operator_rows
from bigplan.solve.candidate import Workload
from bigplan.solve.legality import require_legal_placement
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.lora import Lora
from bigplan.spec.optimizer import Optimizer, orthogonalised
from bigplan.spec.training import Training

pytestmark = pytest.mark.usefixtures("first_plans")

MUON = Training(sequence_length=4096, global_batch=16, optimizer=Optimizer(name="muon"))
ADAMW = MUON.model_copy(update={"optimizer": Optimizer()})
MODEL = find_model("llama-3-8b")
H200 = find_cluster("h200-1x")


def short(gib: int = 40) -> Cluster:
    """A GPU that has not enough memory for all of the state."""
    return H200.with_caps(gpu=gib << 30)


@cache
def planned(optimizer: str = "muon", **settings: str) -> Plan:
    """llama-3-8b with its state in host memory."""
    training = MUON if optimizer == "muon" else ADAMW
    return make_plan(Request(MODEL, training, short(), {"micro_batch": 4, **settings}))


def test_matrices_of_blocks_are_muons() -> None:
    """All that a block multiplies by; not embedding, head, norms, biases, positions."""
    for name in ("llama-3-8b", "gpt2-xl", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b"):
        model = find_model(name)
        for kind, parameters in model.kinds().items():
            for parameter in parameters:
                last = parameter.name.rsplit(".", 1)[-1]
                plain = kind in ("embedding", "head") or last == "bias" or "norm" in parameter.name
                expected = not plain and len(parameter.shape) == 2 and not parameter.constant
                assert orthogonalised(MUON.optimizer, kind, parameter) == expected, parameter.name
                assert not orthogonalised(Optimizer(), kind, parameter)


def test_state_takes_8_bytes_of_matrices_and_12_of_the_rest() -> None:
    graph = build_graph(MODEL, MUON, Strategy(dp=1))
    block, head = graph.kinds["block"], graph.kinds["head"]
    assert block.others == 2 * MODEL.hidden  # its norms
    assert graph.state_bytes(block, block.parameters) == 8 * block.parameters + 4 * block.others
    for elements in (1, head.parameters // 2, head.parameters):
        assert graph.state_bytes(head, elements) == 12 * elements
    assert element_sizes(ADAMW).state_bytes(100) == 1200


def test_directions_take_so_many_flops() -> None:
    """5 (4 m^2 n + 2 m^3) of each matrix, with m <= n."""
    block = build_graph(MODEL, MUON, Strategy(dp=1)).kinds["block"]
    sides = [sorted((t.rows, t.columns)) for t in block.orthogonalised]
    expected = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sides)
    found = sum(p.flops for p in products(block.orthogonalised, 5) if isinstance(p, Gemm))
    assert found == expected
    # 20.8 TFLOP, at some 650 TFLOP/s.
    assert 0.025 < _seconds(Strategy(dp=1)) < 0.045


def test_experts_are_many_small_matrices() -> None:
    """Fewer FLOPs than one matrix of all, and batches bounded in memory."""
    model = find_model("mixtral-8x7b")
    graph = build_graph(model, MUON, Strategy(dp=1))
    gate = next(
        t for t in graph.kinds["block"].orthogonalised if t.name.endswith("gate_proj.weight")
    )
    m, n = sorted((model.hidden, model.ffn))
    found = sum(p.flops for p in products((gate,), 1) if isinstance(p, Gemm))
    assert found == model.experts * (4 * m * m * n + 2 * m**3)
    assert workspace(graph) < 16 * gate.elements


def _seconds(strategy: Strategy) -> float:
    nodes = find_cluster("dgx-h100").group if strategy.ranks > 1 else H200.group
    graph = build_graph(MODEL, MUON, strategy)
    return price(graph, MUON, nodes).kinds["block"].orthogonalise


def test_ranks_of_zero_orthogonalise_their_part_alone() -> None:
    """With what they gather they take less than without ZeRO, and a matrix at least."""
    whole, parted = _seconds(Strategy(dp=8)), _seconds(Strategy(dp=8, zero=1))
    assert whole / 8 < parted < whole
    block = build_graph(MODEL, MUON, Strategy(dp=8, zero=1)).kinds["block"]
    owned = block.owned(8)
    every = [tuple(touched(block, range(i * owned, (i + 1) * owned))) for i in range(8)]
    assert {t for each in every for t in each} == set(block.orthogonalised)
    most = max(sum(t.elements for t in each) for each in every)
    looked_at = [tuple(touched(block, part)) for part in parts(block.tensors, owned)]
    assert max(sum(t.elements for t in each) for each in looked_at) == most


def test_tensor_parallel_ranks_orthogonalise_whole_matrices() -> None:
    """Each does so with all that it has a part of, and gathers the parts."""
    nodes = find_cluster("dgx-h100").group
    graphs = [build_graph(MODEL, MUON, Strategy(dp=8 // tp, tp=tp)) for tp in (1, 4)]
    one, split = (graph.kinds["block"] for graph in graphs)
    assert split.directions == one.orthogonalised
    assert 4 * sum(t.elements for t in split.orthogonalised) == sum(
        t.elements for t in split.directions
    )
    assert workspace(graphs[1]) > workspace(graphs[0])
    alone, gathering = (price(graph, MUON, nodes).kinds["block"] for graph in graphs)
    parts = 2 * sum(t.elements for t in split.directions)  # bytes in bf16
    assert gathering.orthogonalise > alone.orthogonalise
    assert gathering.orthogonalise - alone.orthogonalise < 3 * parts / 100e9  # NVLink is faster
    plan = make_plan(Request(MODEL, MUON, find_cluster("dgx-h100"), {"tp": 2}, engine="native"))
    assert plan.strategy.tp == 2


def test_a_gpu_without_bf16_is_refused() -> None:
    gpu = H200.group.gpu
    flops = {name: rate for name, rate in gpu.peak_flops.items() if name != "bf16"}
    nodes = H200.group.model_copy(update={"gpu": gpu.model_copy(update={"peak_flops": flops})})
    training = MUON.model_copy(update={"precision": "fp32"})
    with pytest.raises(InputError, match="Muon makes its directions"):
        price(build_graph(MODEL, training, Strategy(dp=1)), training, nodes)


def test_layers_state_is_whole_and_streamed() -> None:
    """And takes less memory than AdamW's, whose directions take no time."""
    for stage in planned().placement.stages:
        block = stage.kinds["block"]
        on_gpu, on_host = (block.optimizer.get(tier, 0.0) for tier in (Tier.GPU, Tier.HOST))
        assert on_gpu == pytest.approx(round(on_gpu), abs=1e-6)
        assert block.streamed == pytest.approx(on_host)
        assert on_gpu + on_host == pytest.approx(block.layers)
    ours, theirs = (
        sum(p.placement.stages[0].kinds["block"].optimizer.values())
        for p in (planned(), planned("adamw"))
    )
    assert ours == pytest.approx(theirs)
    update = planned().predicted.parts.update - planned("adamw").predicted.parts.update
    assert update > 0.9 * MODEL.layers * _seconds(Strategy(dp=1))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optimizer": "nvme"}, "nvme"),
        ({"optimizer.host": "0.5"}, "layers whole"),
        ({"streamed": "0.5"}, "layers whole"),
    ],
)
def test_what_muon_does_not_do_is_named(settings: dict[str, str], told: str) -> None:
    with pytest.raises((InputError, RefusedError), match=told):
        make_plan(Request(MODEL, MUON, short(), settings))


def test_other_refusals() -> None:
    assert muon_refusal(ADAMW, {"tp": 2}) is None
    assert muon_refusal(MUON, {"tp": 2}) is None
    assert "spread over ranks" in (muon_refusal(MUON, {"ep": 2}) or "")
    assert "unlike nodes" in (muon_refusal(MUON, {"replicas": (1, 2)}) or "")
    lora = MUON.model_copy(update={"lora": Lora(rank=4)})
    assert "adapters" in (muon_refusal(lora, {}) or "")
    for tool in ("DeepSpeed", "megatron", "torchtitan"):
        assert "Muon" in (other_tools_refusal(MODEL, MUON, tool) or "")
    with pytest.raises(ValidationError, match="leave moments out"):
        Optimizer(name="muon", moments="int8")
    with pytest.raises(ValidationError, match="ns_steps"):
        Optimizer(ns_steps=3)
    assert Optimizer(name="muon").momentum == 0.95
    assert Optimizer(name="sgd").momentum == 0.9


@pytest.mark.parametrize(
    "change", [{"streamed": 0.0}, {"optimizer": {Tier.GPU: 0.5, Tier.HOST: 31.5}}]
)
def test_a_plan_that_was_read_is_whole_too(change: dict[str, object]) -> None:
    plan = planned()
    kinds = plan.placement.stages[0].kinds
    block = kinds["block"].model_copy(update=change)
    stage = plan.placement.stages[0].model_copy(update={"kinds": {**kinds, "block": block}})
    placement = plan.placement.model_copy(update={"stages": (stage,)})
    workload = Workload(plan.model, plan.training, plan.cluster.group)
    graph = build_graph(plan.model, plan.training, plan.strategy)
    with pytest.raises(InputError, match="Muon"):
        require_legal_placement(workload, graph, placement)


def test_explain_says_what_muon_would_save() -> None:
    """Four bytes of every matrix, and the seconds that a plan by it has."""
    plan = planned("adamw")
    (found,) = [one for one in advice_of(plan, operator_rows(plan)) if one.about == "muon"]
    assert "26 GiB" in found.text
    assert "8 bytes a parameter there in place of 12" in found.text
    ours = planned()
    assert not [one for one in advice_of(ours, operator_rows(ours)) if one.about == "muon"]


@pytest.mark.parametrize(("group", "expected"), [(0, (0, 1, 2, 3)), (2, (2, 3))])
def test_updates_gather_over_the_ranks_that_share_states(
    group: int, expected: tuple[int, ...]
) -> None:
    strategy = Strategy(dp=4, zero=1, zero_group=group)
    assert members(GroupName.UPDATE, Coordinates.of(3, strategy), strategy) == expected
    assert GroupName.UPDATE in communicating(strategy, muon=True)
    assert GroupName.UPDATE not in communicating(strategy)
    assert GroupName.UPDATE not in communicating(Strategy(dp=4), muon=True)
