"""Cheap bounds: below dearer ones, and infinite only where nothing fits, whatever is pinned."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.cost import Costs
from bigplan.graph.graph import Graph
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.solve.bounds import cheap_bound, family_bound, memory_outlook
from bigplan.solve.candidate import Workload
from bigplan.solve.choice import Choice, Scope
from bigplan.solve.formulation import formulate
from bigplan.solve.ilp import shortages, solve
from bigplan.solve.pins import parse_pins, rings_tried
from bigplan.solve.resolve import bounding_problem, problem_of
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.examples import examples
from tests.toys import COSTS, ROOMY, enlarged, graphs, prices, quickened, toy_graph, with_capacity

MIB = 2**20
SOLVER = 1 + 1e-5  # HiGHS accepts rows broken by 1e-7 of their scale

VALUES: dict[str, tuple[str | int | float, ...]] = {
    **dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), tuple(map(str, Tier))),
    "recompute": ("none", "selective", "full"),
    **dict.fromkeys(("block.parameters.gpu", "block.gradients.host"), (0, 1, 3)),
    **dict.fromkeys(("optimizer.gpu", "first.block.optimizer.nvme"), (0, 0.25, 1)),
    **dict.fromkeys(("block.recompute.none", "block.recompute.full"), (0, 1, 2, 4)),
    **dict.fromkeys(("block.activations.gpu", "last.activations.full.host"), (0, 1, 2, 4)),
    "streamed": (0, 0.5, 1),
    "slots": (1, 2),
    "shared_ends": (0, 1),
}
# A few at a time: many contradict each other.
SETTINGS = st.dictionaries(
    st.sampled_from(list(VALUES)), st.integers(0, 11), min_size=1, max_size=3
).map(lambda drawn: {key: VALUES[key][i % len(VALUES[key])] for key, i in drawn.items()})


@settings(max_examples=examples(150))
@given(graphs(), prices(), st.sampled_from(list(Tier)), st.integers(0, 12), SETTINGS)
def test_whatever_is_pinned_the_bound_is_below_the_relaxation(
    toy: Graph, costs: Costs, tier: Tier, gib: int, chosen: dict[str, str | int | float]
) -> None:
    """One memory is as small as it may be, another is small."""
    graph, pins = enlarged(toy), parse_pins(chosen)[1]
    rings = rings_tried(pins)
    other = Tier.GPU if tier is not Tier.GPU else Tier.HOST
    for room in (0, gib * 2**30, ROOMY[other]):
        scarce = with_capacity(quickened(costs), **{tier: 0, other: room})
        problem = formulate(graph, scarce, pins, rings[0], rings[-1])
        for short in shortages(problem, (tier,)):
            least = {tier: int(short.nbytes * SOLVER) + 1, other: room}
            tight = with_capacity(quickened(costs), **least)
            relaxed = solve(formulate(graph, tight, pins, rings[0], rings[-1]), relaxed=True)
            assert relaxed is not None
            known = memory_outlook(graph, tight, rings, pins)
            assert known.bound <= relaxed.step_seconds * SOLVER
            assert known.bound <= known.estimate


def _workload(gpu: int) -> Workload:
    """A small model on a node of eight GPUs, each capped to so many MiB."""
    cluster = find_cluster("dgx-h100")
    capped = cluster.with_caps(gpu=gpu * MIB + cluster.group.gpu.context_memory)
    training = Training(sequence_length=256, global_batch=64)
    return Workload(find_model("tiny-llama-demo"), training, capped.group)


def test_cheaper_bounds_are_below_dearer_ones() -> None:
    workload = _workload(60)
    choice = Choice.of(workload, Scope())
    tried = rings_tried(())
    for candidate in choice.candidates()[::23]:
        strategy, graph, costs = candidate.strategy, candidate.graph, candidate.costs
        number = strategy.micro_batches(workload.training)
        family = family_bound(graph, costs, number, strategy.pp)
        cheap = cheap_bound(graph, costs)
        known = memory_outlook(graph, costs, tried).bound
        relaxed = solve(bounding_problem(candidate, ()), relaxed=True)
        assert family <= cheap * SOLVER
        assert cheap <= known
        if relaxed is not None:
            assert known <= relaxed.step_seconds * SOLVER
        for rings in tried:
            placed = solve(problem_of(candidate, (), rings))
            if placed is not None:
                assert relaxed is not None
                assert relaxed.step_seconds <= placed.step_seconds * SOLVER


@pytest.mark.parametrize(
    ("chosen", "limits"),
    [
        ({"activations": "gpu", "recompute": "none"}, {"gpu": 2500}),
        ({"activations": "gpu", "block.recompute.none": 12}, {"gpu": 2500}),
    ],
    ids=lambda value: ",".join(f"{key}={amount}" for key, amount in value.items()),
)
def test_pinned_activations_without_room_need_no_solver(
    chosen: dict[str, str | int | float], limits: dict[str, int]
) -> None:
    graph, pins = (
        enlarged(toy_graph(Strategy(dp=1, accumulation_group=8), blocks=12)),
        parse_pins(chosen)[1],
    )
    tight = with_capacity(quickened(COSTS), **{tier: n * MIB for tier, n in limits.items()})
    assert memory_outlook(graph, tight, pins=pins).bound == inf
    assert memory_outlook(graph, tight).bound < inf
    assert solve(formulate(graph, tight, pins), relaxed=True) is None
    assert solve(formulate(graph, tight), relaxed=True) is not None


def test_pinned_recomputation_is_in_the_bound() -> None:
    graph, costs = enlarged(toy_graph(blocks=4, units=2)), quickened(COSTS)
    plain, full = (
        memory_outlook(graph, costs, pins=parse_pins({"recompute": policy})[1]).bound
        for policy in ("none", "full")
    )
    again = costs.kinds["block"].forward  # of four blocks and two units
    assert full == pytest.approx(plain + 8 * again)
