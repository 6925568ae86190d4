"""The model's step is a lower bound of the simulated one, for every placement."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from bigplan.cost import KindCost
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower
from bigplan.placement import Rings, Tier
from bigplan.simulate import simulate
from bigplan.solve.bounds import cheap_bound
from bigplan.solve.candidate import Candidate, Workload
from bigplan.solve.decisions import decisions_of
from bigplan.solve.formulation import formulate, placement_of
from bigplan.solve.ilp import solve
from bigplan.solve.resolve import problem_of
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from bigplan.units import PerRank
from tests.examples import examples
from tests.toys import COSTS, Case, cases, kind_placement, muon_cases, placed, toy_graph, values_of

ROUNDING = 1 + 1e-9  # sums of thousands of floats in another order


@settings(max_examples=examples(400))
@given(cases())
def test_the_bound_is_below_the_simulated_step(case: Case) -> None:
    _check_bound(case)


@settings(max_examples=examples(40))
@given(muon_cases())
def test_so_it_is_with_muon(case: Case) -> None:
    """Whose updates take the GPU's compute, wherever a layer's state is."""
    _check_bound(case)


def _check_bound(case: Case) -> None:
    problem = formulate(case.graph, case.costs, Rings.of(case.placement))
    bound = problem.step_seconds(values_of(case))
    simulated = case.timeline.seconds
    assert 0 < bound <= simulated * ROUNDING
    assert cheap_bound(case.graph, case.costs) <= bound * ROUNDING


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 1])
def test_without_moves_the_bound_is_close(pp: int, zero: int) -> None:
    graph = toy_graph(Strategy(dp=2, pp=pp, zero=zero), blocks=4, units=32)
    placement = placed(graph)
    bound = formulate(graph, COSTS).step_seconds(decisions_of(graph, placement))
    simulated = simulate(lower(graph, placement), graph, COSTS).seconds
    # 32 units of 18 s of compute, spread over the stages; at the ends of a step stand what no
    # other work hides: a reduction, a gather and an update of a layer or two, 1 s each at most,
    # and with two stages a hop that the bound takes for free.
    assert bound >= 0.98 * simulated


def test_the_bound_sees_what_binds() -> None:
    graph = toy_graph(blocks=4, units=16, deferred=False)
    streamed = placed(
        graph,
        block=kind_placement(4, Tier.HOST, Tier.HOST, (Recompute.FULL, Tier.HOST), Tier.HOST),
    )
    bound = formulate(graph, COSTS).step_seconds(decisions_of(graph, streamed))
    timeline = simulate(lower(graph, streamed), graph, COSTS)
    busiest = max(timeline.busy().values())
    assert busiest <= bound * 1.25  # whichever lane is busiest, the bound knows most of its work
    assert bound <= timeline.seconds


def test_the_last_layer_waits_for_all_updates() -> None:
    graph = toy_graph(blocks=4, units=1)
    kinds = {**COSTS.kinds, "head": KindCost(4.0, 6.0)}
    costs = replace(COSTS, kinds=kinds, rates=replace(COSTS.rates, cpu_update=PerRank(18.0)))
    streamed = kind_placement(4, Tier.HOST, Tier.HOST, optimizer=Tier.HOST)
    head = kind_placement(1, Tier.HOST, Tier.HOST, optimizer=Tier.HOST)
    placement = placed(graph, block=streamed, head=head)
    bound = formulate(graph, costs).step_seconds(decisions_of(graph, placement))
    simulated = simulate(lower(graph, placement), graph, costs).seconds
    # 10 s of CPU updates, 10 s of the loss, 8 s and more of backward: none beside another.
    assert 28 <= bound <= simulated <= 1.1 * bound


def test_a_surcharge_pays_for_no_empty_slots() -> None:
    graph = toy_graph(blocks=5, units=4)
    serial = formulate(graph, COSTS).serial
    assert all(factor >= 0 for name, factor in serial.terms.items() if ".has." in name)


@settings(max_examples=examples(200))
@given(cases())
def test_every_placement_keeps_the_rules(case: Case) -> None:
    """The rules that rings exist where layers use them, and only there, among them."""
    values = values_of(case)
    for rule in formulate(case.graph, case.costs, Rings.of(case.placement)).rules:
        missed = rule.expression.at(values)
        assert missed <= 1e-9, rule.name
        assert not rule.equal or missed >= -1e-9, rule.name


@pytest.mark.parametrize(("micro_batch", "group"), [(4, 4), (1, 16), (2, 2)])
def test_an_optimum_gains_nothing_from_what_no_placement_has(micro_batch: int, group: int) -> None:
    """Rings without a layer once took a sixth off the bound where drives bind."""
    workload = Workload(
        find_model("llama-3-8b"),
        Training(sequence_length=4096, global_batch=16),
        find_cluster("rtx-4090-workstation").group,
    )
    strategy = Strategy(dp=1, micro_batch=micro_batch, accumulation_group=group)
    candidate = Candidate.of(workload, strategy)
    problem = problem_of(candidate, ())
    found = solve(problem)
    assert found is not None
    placement = placement_of(candidate.graph, found.values)
    assert Tier.NVME in placement.stages[0].kinds["block"].optimizer
    again = problem.step_seconds(decisions_of(candidate.graph, placement))
    assert again == pytest.approx(found.step_seconds, rel=1e-4)
