"""Plans of frozen models with adapters."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest

from bigplan.cost import Costs, KindCost, Rates
from bigplan.cost.price import price
from bigplan.errors import InputError
from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import Space
from bigplan.lower import lower, lower_buffers, lower_steady
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.simulate import simulate
from bigplan.solve.candidate import Candidate
from bigplan.solve.exact import exact_placement
from bigplan.solve.pins import Pin, parse_pins, refuse_of_trained
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.lora import Lora
from bigplan.spec.sharing import NodeSharing
from bigplan.spec.training import Training
from bigplan.units import PerRank
from bigplan.verify import used_bytes, verify
from tests.toys import KINDS, ROOMY, toy_graph, with_capacity

ENDS = tuple(Pin(kind, "parameters", "gpu", None) for kind in ("embedding", "head"))
TRAINING = Training(sequence_length=1024, global_batch=8, lora=Lora(rank=8))


def _kind(parameters: dict[Tier, int], kept: dict[Recompute, dict[Tier, int]]) -> KindPlacement:
    return KindPlacement(layers=sum(parameters.values()), parameters=parameters, activations=kept)


def _ways(graph: Graph) -> list[Placement]:
    """Every way to place the blocks, order left out, with the ends on the GPU."""
    blocks, end = graph.layers.count("block"), {Recompute.NONE: {Tier.GPU: 1}}
    homes = combinations_with_replacement(Tier, blocks)
    kept = combinations_with_replacement(tuple(product(Recompute, Tier)), blocks)
    found = []
    for tiers, policies in product(list(homes), list(kept)):
        block = _kind(
            {tier: tiers.count(tier) for tier in tiers},
            {r: {tier: policies.count((r, tier)) for tier in Tier} for r in Recompute},
        )
        ends = {name: _kind({Tier.GPU: 1}, end) for name in ("embedding", "head")}
        found.append(Placement(stages=(StagePlacement(kinds={**ends, "block": block}),)))
    return found


def _random_costs(rng: random.Random) -> Costs:
    rates = Rates(*(PerRank(10 ** rng.uniform(1.3, 3.3)) for _ in range(10)))
    kinds = {name: KindCost(rng.uniform(0.2, 2), rng.uniform(0.2, 3)) for name in KINDS}
    kinds["embedding"] = replace(kinds["embedding"], backward=0.0)
    return Costs(kinds, rates, 0.1, ROOMY, NodeSharing(1))


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_the_best_placement_is_that_of_a_brute_force(seed: int) -> None:
    """With a third of the bytes between the most and the least that ways take on the GPU."""
    rng = random.Random(seed)
    graph = toy_graph(blocks=2, units=1 + seed % 2, deferred=seed < 3, frozen=True)
    ways = _ways(graph)
    taken = [used_bytes(lower_buffers(graph, way), Tier.GPU, NodeSharing(1)) for way in ways]
    room = min(taken) + (max(taken) - min(taken)) // 3
    costs = with_capacity(_random_costs(rng), gpu=room)
    fitting = [
        lower_steady(graph, way, lambda each: used_bytes(each, Tier.GPU, costs.sharing) <= room)
        for way in ways
    ]
    best = min(simulate(each, graph, costs).seconds for each in fitting if each is not None)
    found = exact_placement(Candidate(graph.strategy, graph, costs), ENDS)
    assert found is not None
    assert found.seconds == best
    verify(found.programs, graph, costs.capacity, costs.sharing)


def test_adapters_are_updated_and_summed_in_the_price_of_a_step() -> None:
    """Replicas sum all adapters, tensor-parallel ranks those that several hold."""
    model = find_model("llama-3-8b").model_copy(update={"layers": 2})
    nodes = find_cluster("dgx-h100").with_nodes(1).group
    strategy = Strategy(dp=8, micro_batch=1)
    graph = build_graph(model, TRAINING, strategy, fused=True)
    costs = price(graph, TRAINING, nodes)
    assert costs.adapters.reduce > 0
    assert costs.adapters.tensor_reduce == 0
    assert all(kind.reduce == 0 for kind in costs.kinds.values())
    split = build_graph(model, TRAINING, Strategy(dp=1, tp=8), fused=True)
    assert price(split, TRAINING, nodes).adapters.tensor_reduce > 0
    plain = TRAINING.model_copy(update={"lora": None})
    assert price(build_graph(model, plain, strategy), plain, nodes).adapters == KindCost(0.0, 0.0)


def test_zero_shards_parameters_or_nothing() -> None:
    space = Space(find_model("llama-3-8b"), TRAINING, 8, 8)
    assert {strategy.zero for strategy in space.strategies()} == {0, 3}
    pinned = replace(space, fixed={"zero": 1})
    assert not list(pinned.strategies())


@pytest.mark.parametrize(
    "pin", [{"zero": 1}, {"zero": 2}, {"gradients": "host"}, {"block.optimizer.host": 0.5}]
)
def test_pins_of_what_is_not_there_are_refused(pin: dict[str, str | int | float]) -> None:
    with pytest.raises(InputError, match="with lora"):
        refuse_of_trained(*parse_pins(pin))
    refuse_of_trained(*parse_pins({"zero": 3, "parameters": "host", "recompute": "full"}))


def test_bytes_on_a_gpu_are_frozen_weights_and_adapters_with_their_state() -> None:
    """2 bytes a frozen weight; 2, 4 and 12 a trained one, in bf16."""
    model = find_model("llama-3-8b").model_copy(update={"layers": 2})
    graph = build_graph(model, TRAINING, Strategy(dp=1), fused=True)
    end = {Recompute.NONE: {Tier.GPU: 1}}
    kinds = {name: _kind({Tier.GPU: 1}, end) for name in ("embedding", "head")}
    kinds["block"] = _kind({Tier.GPU: 2}, {Recompute.FULL: {Tier.GPU: 2}})
    (program,) = lower(graph, Placement(stages=(StagePlacement(kinds=kinds),)))
    found = {buffer.purpose: 0 for buffer in program.buffers.values()}
    for buffer in program.buffers.values():
        found[buffer.purpose] += buffer.total if buffer.tier is Tier.GPU else 0
    assert found["parameters"] == 2 * model.parameter_count
    assert found["adapters"] == 18 * graph.adapters(graph.stage_layers(0)).elements
    assert "gradients" not in found
    assert "optimizer" not in found
