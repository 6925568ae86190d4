"""The exact mode against a brute force over the simulator that shares none of its code."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement, product

import pytest

from bigplan.cost import Costs, KindCost, Rates
from bigplan.errors import InputError
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower, lower_steady
from bigplan.placement import KindPlacement, Placement, StagePlacement, Tier
from bigplan.program import Program
from bigplan.simulate import simulate
from bigplan.solve.candidate import Candidate
from bigplan.solve.exact import decisions, exact_placement
from bigplan.solve.pins import Pin
from bigplan.solve.stage import stage_classes
from bigplan.spec.layers import BLOCKS
from bigplan.spec.sharing import NodeSharing
from bigplan.units import PerRank
from bigplan.verify import used_bytes, verify
from tests.toys import KINDS, kind_placement, placed, toy_graph, toy_kind, with_capacity

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # the grid that exact mode promises for optimizer state
Policies = tuple[tuple[Recompute, Tier], ...]
POLICIES = tuple(product(Recompute, Tier))
PINNED_ENDS = (
    *(Pin(kind, tensor, "gpu", None) for kind in ("embedding", "head") for tensor in
      ("parameters", "gradients", "optimizer")),
)  # fmt: skip
ON_HOST = (1.0,)  # what of the state is not on the GPU


def _blocks(
    layers: int, policies: Policies, homes: tuple[Tier, ...], on_host: tuple[float, ...]
) -> Iterator[KindPlacement]:
    """Every way to place some blocks: a tier or policy for each, order left out.

    `on_host`: shares of the state off the GPU.
    """
    each = [
        list(combinations_with_replacement(choices, layers))
        for choices in (homes, tuple(Tier), policies)
    ]
    for parameters, gradients, chosen in product(*each):
        both = min(parameters.count(Tier.GPU), gradients.count(Tier.GPU))
        for gpu, host in product(sorted({share * both for share in SHARES}), on_host):
            rest = layers - gpu
            yield KindPlacement(
                layers=layers,
                parameters={tier: parameters.count(tier) for tier in set(parameters)},
                gradients={tier: gradients.count(tier) for tier in set(gradients)},
                activations={
                    recompute: {tier: chosen.count((recompute, tier)) for tier in Tier}
                    for recompute in Recompute
                },
                optimizer={Tier.GPU: gpu, Tier.HOST: rest * host, Tier.NVME: rest * (1 - host)},
            )


def _fits(programs: Sequence[Program], costs: Costs) -> bool:
    return all(used_bytes(programs, tier, costs.sharing) <= costs.capacity[tier] for tier in Tier)


def brute_force(
    graph: Graph,
    costs: Costs,
    policies: Policies,
    parameters: tuple[Tier, ...],
    on_host: tuple[float, ...] = SHARES,
) -> float | None:
    """Seconds of the fastest placement of the blocks that fits, the ends staying on the GPU."""
    best, each, fit = None, [], partial(_fits, costs=costs)
    for stage in range(graph.strategy.pp):
        layers = [graph.layers[layer] for layer in graph.stage_layers(stage)]
        choices = {
            name: [*_blocks(layers.count(name), policies, parameters, on_host)]
            if name in BLOCKS
            else [KindPlacement.on_gpu(1)]
            for name in dict.fromkeys(layers)
        }
        each.append(
            [dict(zip(choices, kinds, strict=True)) for kinds in product(*choices.values())]
        )
    for chosen in product(*each):
        stages = [StagePlacement(kinds=kinds) for kinds in chosen]
        programs = lower_steady(graph, Placement(stages=tuple(stages)), fit)
        if programs is not None:
            seconds = simulate(programs, graph, costs).seconds
            best = seconds if best is None else min(best, seconds)
    return best


def _random_costs(rng: random.Random) -> Costs:
    rates = Rates(*(PerRank(10 ** rng.uniform(1.3, 3.3)) for _ in range(10)))
    kinds = {name: KindCost(rng.uniform(0.2, 2), rng.uniform(0.2, 3)) for name in KINDS}
    return with_capacity(Costs(kinds, rates, 0.1, {}, NodeSharing(1)))


def _range(graph: Graph) -> tuple[int, int]:
    """GPU bytes of the placement that keeps all there, and of one that keeps little."""
    every = [lower(graph, placement) for placement in _two_ends(graph)]
    most, least = (max(p.bytes_by_tier()[Tier.GPU] for p in programs) for programs in every)
    return most, least


def _two_ends(graph: Graph) -> Iterator[Placement]:
    blocks = graph.layers.count("block") // graph.strategy.pp
    stores = graph.kinds["block"].stores_activations
    recompute, tier = (Recompute.FULL, Tier.HOST) if stores else (Recompute.NONE, Tier.GPU)
    away = KindPlacement(
        layers=blocks,
        parameters={Tier.HOST: blocks},
        gradients={Tier.HOST: blocks},
        activations={recompute: {tier: blocks}},
        optimizer={Tier.HOST: float(blocks)},
    )
    for block in (KindPlacement.on_gpu(blocks), away):
        stages = []
        for stage in range(graph.strategy.pp):
            names = {graph.layers[layer] for layer in graph.stage_layers(stage)}
            ends = {name: KindPlacement.on_gpu(1) for name in names - {"block"}}
            stages.append(StagePlacement(kinds=ends | {"block": block}))
        yield Placement(stages=tuple(stages))


# `room`: where GPU memory lies between the least and the most that placements need, so that some
# tensors must leave. Host bytes: ample; too few for chunks of NVMe state; too few for the block, so
# that nothing fits with any rings. All ways to keep activations are in one row, and one of them in
# each of the others, which take a quarter of the time.
@pytest.mark.parametrize(
    ("seed", "room", "host", "recompute"),
    [
        *((0, 0.0, 10**12, "full"), (1, 0.15, 10**12, "none"), (2, 0.5, 10**12, "selective")),
        *((3, 0.85, 10**12, None), (4, 0.3, 10**6, "mlp"), (5, 0.6, 10**6, "none")),
        (6, 0.3, 500, "full"),
    ],
)
def test_one_block(seed: int, room: float, host: int, recompute: str | None) -> None:
    rng = random.Random(seed)
    graph = toy_graph(
        Strategy(dp=1, accumulation_group=rng.choice((1, 2))),
        blocks=1,
        units=rng.choice((1, 2, 4)),
        deferred=rng.random() < 0.5,
        master=rng.random() < 0.5,
    )
    most, least = _range(graph)
    gpu = int(least + room * (most - least))
    costs = with_capacity(_random_costs(rng), gpu=gpu, host=host)
    policies = tuple(policy for policy in POLICIES if recompute in (None, policy[0]))
    pins = (Pin("block", "recompute", recompute, None),) if recompute else ()
    _equal(graph, costs, policies, pins=pins)


@pytest.mark.parametrize("seed", range(2))
def test_two_blocks_that_keep_no_activations(seed: int) -> None:
    rng = random.Random(100 + seed)
    graph = toy_graph(blocks=2, units=2, deferred=bool(seed))
    kinds = dict(graph.kinds) | {"block": toy_kind("block", stores_activations=False)}
    graph = replace(graph, kinds=kinds)
    most, least = _range(graph)
    costs = with_capacity(_random_costs(rng), gpu=(most + least) // 2)
    _equal(graph, costs, policies=POLICIES[:1])


def test_two_kinds_of_blocks() -> None:
    """Each is placed on its own; one of them is smaller."""
    graph = toy_graph(blocks=2, units=2, dense=1)
    blocks = [name for name in BLOCKS if name in graph.kinds]
    plain = {name: replace(graph.kinds[name], stores_activations=False) for name in blocks}
    graph = replace(graph, kinds={**graph.kinds, **plain})
    away = kind_placement(1, gradients=Tier.HOST, optimizer=Tier.HOST)
    most, least = (
        max(p.bytes_by_tier()[Tier.GPU] for p in lower(graph, where))
        for where in (placed(graph), placed(graph, dense=away, block=away))
    )
    costs = with_capacity(_random_costs(random.Random(150)), gpu=(most + least) // 2)
    pins = [Pin(kind, "parameters", "gpu", None) for kind in blocks]
    pins += [Pin(kind, "optimizer", "nvme", 0.0) for kind in blocks]
    _equal(graph, costs, POLICIES[:1], (Tier.GPU,), tuple(pins), ON_HOST)


def test_a_block_whose_experts_are_on_two_ranks() -> None:
    """What depends on the routing does not leave the GPU; each rank has its own experts' state."""
    graph = toy_graph(Strategy(dp=2, ep=2, zero=2), blocks=1, units=2)
    fixed = (Recompute.MLP, Recompute.FULL)
    policies = tuple((way, at) for way, at in POLICIES if at is Tier.GPU or way in fixed)
    most, least = _range(graph)
    costs = with_capacity(_random_costs(random.Random(300)), gpu=(most + least) // 2)
    _equal(graph, costs, policies, (Tier.GPU,))


def test_two_stages() -> None:
    rng = random.Random(200)
    graph = toy_graph(Strategy(dp=1, pp=2), blocks=2, units=3)
    kinds = dict(graph.kinds) | {"block": toy_kind("block", stores_activations=False)}
    graph = replace(graph, kinds=kinds)
    most, least = _range(graph)
    costs = with_capacity(_random_costs(rng), gpu=(most + least) // 2)
    pins = Pin("block", "parameters", "gpu", None), Pin("block", "optimizer", "nvme", 0.0)
    _equal(graph, costs, POLICIES[:1], (Tier.GPU,), pins, ON_HOST)


@pytest.mark.parametrize("seed", range(4))
def test_a_block_whose_state_may_be_streamed(seed: int) -> None:
    """Its ring is far larger than a toy, so the GPU is ample and pins keep the state off it."""
    rng = random.Random(300 + seed)
    graph = toy_graph(blocks=1, units=1 + seed % 2, deferred=seed < 2, master=rng.random() < 0.5)
    costs = _random_costs(rng)
    costs = replace(costs, rates=replace(costs.rates, cpu_update=PerRank(3.0)))
    homes = product(Tier, Tier, Tier, (0.0, 0.5, 1.0))
    seconds = {}
    for parameters, gradients, activations, streamed in homes:
        if streamed and Tier.NVME in (parameters, gradients):
            continue
        block = KindPlacement(
            layers=1,
            parameters={parameters: 1},
            gradients={gradients: 1},
            activations={Recompute.NONE: {activations: 1}},
            optimizer={Tier.HOST: 1.0},
            streamed=streamed,
        )
        kinds = {
            "embedding": KindPlacement.on_gpu(1),
            "block": block,
            "head": KindPlacement.on_gpu(1),
        }
        programs = lower(graph, Placement(stages=(StagePlacement(kinds=kinds),)))
        seconds[parameters, gradients, activations, streamed] = simulate(
            programs, graph, costs
        ).seconds
    pins = (Pin("block", "optimizer", "host", None), Pin("block", "recompute", "none", None))
    found = exact_placement(Candidate(graph.strategy, graph, costs), (*PINNED_ENDS, *pins))
    assert found is not None
    assert found.seconds == min(seconds.values())
    *_, streamed = min(seconds, key=seconds.__getitem__)
    assert streamed > 0  # by so slow a CPU


def _equal(
    graph: Graph,
    costs: Costs,
    policies: Policies = POLICIES,
    parameters: tuple[Tier, ...] = tuple(Tier),
    pins: tuple[Pin, ...] = (),
    on_host: tuple[float, ...] = SHARES,
) -> None:
    expected = brute_force(graph, costs, policies, parameters, on_host)
    found = exact_placement(Candidate(graph.strategy, graph, costs), (*PINNED_ENDS, *pins))
    if expected is None:
        assert found is None
        return
    assert found is not None
    # The minimum of the same simulations, whichever placement reaches it first.
    assert found.seconds == expected
    verify(found.programs, graph, costs.capacity, costs.sharing)
    assert _fits(found.programs, costs)


def test_too_many_placements_are_refused() -> None:
    with pytest.raises(InputError, match="it is for small problems of at most 200000"):
        decisions(stage_classes(toy_graph(blocks=4)))
