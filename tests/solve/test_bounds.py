"""Cheap bounds are below dearer ones; only where nothing fits there is no room."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.cost import Costs
from bigplan.graph.graph import Graph
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower
from bigplan.placement import Tier
from bigplan.simulate import step_seconds
from bigplan.solve.bounds import (
    cheap_bound,
    family_bound,
    lacks_room,
    round_trips,
    sent_seconds,
)
from bigplan.solve.candidate import Pricing, Workload
from bigplan.solve.choice import Choice, Scope
from bigplan.solve.formulation import formulate
from bigplan.solve.ilp import shortages, solve
from bigplan.solve.pins import parse_pins, rings_tried
from bigplan.solve.resolve import bounding_problem, fits, problem_of
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.link import find_network
from bigplan.spec.training import Training
from tests.examples import examples
from tests.toys import (
    COSTS,
    ROOMY,
    Case,
    cases,
    enlarged,
    graphs,
    placed,
    prices,
    quickened,
    toy_graph,
    with_capacity,
)

MIB = 2**20
ROUNDING = 1 + 1e-9
SOLVER = 1 + 1e-5  # HiGHS accepts rows broken by 1e-7 of their scale


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
    for candidate in choice.candidates()[::97]:
        strategy, graph, costs = candidate.strategy, candidate.graph, candidate.costs
        number = strategy.micro_batches(workload.training)
        family = family_bound(graph, costs, number, strategy.pp)
        cheap = cheap_bound(graph, costs)
        relaxed = solve(bounding_problem(candidate, ()), relaxed=True)
        assert family <= cheap * SOLVER
        if relaxed is not None:
            assert cheap <= relaxed.step_seconds * SOLVER
        for rings in tried:
            placed = solve(problem_of(candidate, (), rings))
            if placed is not None:
                assert relaxed is not None
                assert relaxed.step_seconds <= placed.step_seconds * SOLVER


def test_a_familys_bound_counts_no_exchanges_of_another_strategy() -> None:
    """By ZeRO 3 these GPUs' compute loses to gathers, without ZeRO nearly nothing."""
    nodes = find_cluster("dgx-h100").with_nodes(2).group
    assert nodes.gpu.compute_beside_collectives is not None
    training = Training(sequence_length=512, global_batch=64)
    pricing = Pricing(Workload(find_model("llama-3.2-1b"), training, nodes))
    graph, costs = pricing.alike(Strategy(dp=16, zero=3))
    plain = pricing.candidate(Strategy(dp=16))
    bound = family_bound(graph, costs, plain.graph.micro_batches, stages=1)
    assert bound <= cheap_bound(plain.graph, plain.costs) * ROUNDING


def test_messages_over_a_slow_network_bound_a_step() -> None:
    """Two stages on each of two nodes on 10 Gb/s: the model, too, has messages take turns."""
    slow = {"inter_node": find_network("ethernet-10g"), "nodes": 2}
    group = find_cluster("dgx-h100").group.model_copy(update=slow)
    training = Training(sequence_length=256, global_batch=64)
    workload = Workload(find_model("tiny-llama-demo"), training, group)
    found = [c for c in Choice.of(workload, Scope()).candidates() if c.strategy.pp == 4][::29]
    assert found
    for candidate in found:
        graph, costs = candidate.graph, candidate.costs
        sent = sent_seconds(graph, costs)
        messages = 2 * candidate.strategy.vpp * graph.micro_batches
        assert sent == messages * costs.send
        cheap = cheap_bound(graph, costs)
        relaxed = solve(bounding_problem(candidate, ()), relaxed=True)
        assert relaxed is not None
        assert sent <= cheap <= relaxed.step_seconds * SOLVER


@settings(max_examples=examples(60))
@given(cases((2, 4), free=True), st.sampled_from((0.1, 2.0, 20.0)))
def test_no_step_is_shorter_than_its_round_trips(case: Case, send: float) -> None:
    costs = replace(case.costs, send=send)
    played = step_seconds(lower(case.graph, case.placement), case.graph, costs)
    assert 0 <= round_trips(case.graph, costs) <= played * ROUNDING


@pytest.mark.parametrize("group", [1, 4])
def test_round_trips_are_what_binds_on_slow_networks(group: int) -> None:
    """Two units are in flight; a micro-batch has 18 s of compute and two messages of 10 s."""
    graph = toy_graph(Strategy(dp=1, pp=2, accumulation_group=group), blocks=4, units=8)
    costs = replace(COSTS, send=10.0)
    played = step_seconds(lower(graph, placed(graph)), graph, costs)
    assert 0.85 * played <= round_trips(graph, costs) <= played


def test_what_fits_is_what_a_linear_program_with_times_places() -> None:
    found = set()
    for mib, gradients in product((10, 100, 1000), ("gpu", "host")):
        workload = _workload(mib)
        choice = Choice.of(workload, Scope())
        for candidate in choice.candidates()[::171]:
            _, pins = parse_pins({"gradients": gradients})
            placed = solve(bounding_problem(candidate, pins), relaxed=True)
            assert fits(candidate, pins) == (placed is not None)
            found.add(placed is not None)
    assert found == {True, False}


@settings(max_examples=examples(150))
@given(graphs(), prices(), st.sampled_from(list(Tier)), st.integers(0, 12))
def test_there_is_no_room_only_where_nothing_fits(
    toy: Graph, costs: Costs, tier: Tier, gib: int
) -> None:
    """One memory is as small as it may be, another is small."""
    graph, rings = enlarged(toy), rings_tried(())
    other = Tier.GPU if tier is not Tier.GPU else Tier.HOST
    for room in (0, gib * 2**30, ROOMY[other]):
        scarce = with_capacity(quickened(costs), **{tier: 0, other: room})
        problem = formulate(graph, scarce, rings[0], rings[-1])
        for short in shortages(problem, (tier,)):
            least = {tier: int(short.nbytes * SOLVER) + 1, other: room}
            tight = with_capacity(quickened(costs), **least)
            assert not lacks_room(graph, tight, rings[-1])


def test_without_room_for_activations_there_is_none() -> None:
    graph = enlarged(toy_graph(Strategy(dp=1, accumulation_group=8), blocks=12))
    lacking = [
        lacks_room(graph, with_capacity(quickened(COSTS), gpu=gpu, host=0, nvme=0))
        for gpu in (500 * MIB, 2500 * MIB, ROOMY[Tier.GPU])
    ]
    assert lacking[0]
    assert not lacking[-1]
    assert lacking == sorted(lacking, reverse=True)
