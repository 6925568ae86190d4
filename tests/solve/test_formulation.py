"""The integer program: its relaxation bounds every plan, its solutions are legal placements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.cost import Costs
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower
from bigplan.mechanics import CHUNK_STAGING
from bigplan.placement import CHUNK, Placement, Rings, Tier
from bigplan.solve.decisions import decisions_of
from bigplan.solve.formulation import formulate, pinned, placement_of, rounded
from bigplan.solve.ilp import relaxed_steps, solve
from bigplan.solve.pins import Pin
from bigplan.spec.sharing import NodeSharing
from bigplan.verify import verify
from tests.examples import examples
from tests.toys import (
    COSTS,
    ROOMY,
    Case,
    cases,
    enlarged,
    graphs,
    kind_placement,
    placed,
    prices,
    quickened,
    toy_graph,
    values_of,
    with_capacity,
)

# HiGHS accepts rows broken by 1e-7 of their scale; the step is the sum of a few such rows.
SOLVER = 1 + 1e-5


def _without_zeros(placement: Placement) -> Placement:
    data = placement.model_dump()
    for stage in data["stages"]:
        for rows in stage["kinds"].values():
            for tensor in ("parameters", "gradients", "optimizer"):
                rows[tensor] = {tier: n for tier, n in rows[tensor].items() if n}
            rows["activations"] = {
                recompute: kept
                for recompute, tiers in rows["activations"].items()
                if (kept := {tier: n for tier, n in tiers.items() if n})
            }
    return Placement.model_validate(data)


@settings(max_examples=examples(100))
@given(cases())
def test_decisions_keep_every_rule_and_lead_back(case: Case) -> None:
    problem = formulate(case.graph, case.costs, Rings.of(case.placement))
    values = decisions_of(case.graph, case.placement)
    assert set(values) == {variable.name for variable in problem.variables}
    for variable in problem.variables:
        assert -1e-9 <= values[variable.name] <= variable.upper + 1e-9
    for rule in problem.rules:
        value = rule.expression.at(values)
        assert value <= 1e-9, rule.name
        assert not rule.equal or value >= -1e-9, rule.name
    back, meant = placement_of(case.graph, values), _without_zeros(case.placement)
    for mine, stage in zip(back.stages, meant.stages, strict=True):
        for name, rows in stage.kinds.items():
            assert mine.kinds[name].parameters == rows.parameters
            assert mine.kinds[name].gradients == rows.gradients
            assert mine.kinds[name].activations == rows.activations
            # Placements are written with six digits; what does not fit into them goes to the
            # larger share.
            shares = {tier: rows.optimizer.get(tier, 0.0) for tier in Tier}
            got = {tier: mine.kinds[name].optimizer.get(tier, 0.0) for tier in Tier}
            assert got == pytest.approx(shares, abs=2e-6)
            assert mine.kinds[name].streamed == pytest.approx(rows.streamed, abs=2e-6)


@settings(max_examples=examples(60))
@given(cases())
def test_the_relaxation_is_below_every_plan(toy: Case) -> None:
    case = Case(enlarged(toy.graph), quickened(toy.costs), toy.placement)
    used = {tier: max(p.bytes_by_tier()[tier] for p in case.programs) for tier in Tier}
    # The least memory that the plan needs. Its whole rows and ring entries may take less than the
    # shares they stand for, so a row of state (48 MiB) and staged chunks more.
    extra = 2**28 + CHUNK_STAGING * (CHUNK + 2**26)
    tight = with_capacity(case.costs, **{t.value: used[t] + extra for t in Tier})
    relaxed = solve(formulate(case.graph, tight, Rings.of(case.placement)), relaxed=True)
    assert relaxed is not None
    rings = Rings.of(case.placement)
    whole_rows = formulate(case.graph, case.costs, rings).step_seconds(values_of(case))
    assert relaxed.step_seconds <= max(whole_rows, case.timeline.seconds) * SOLVER


@settings(max_examples=examples(50))
@given(graphs(), prices(), st.floats(0.1, 1.0))
def test_solutions_are_legal_and_their_bound_holds(toy: Graph, prices: Costs, room: float) -> None:
    graph = enlarged(toy)
    whole = lower(graph, placed(graph))
    gpu = int(room * max(p.bytes_by_tier()[Tier.GPU] for p in whole))
    problem = formulate(graph, with_capacity(quickened(prices), gpu=gpu))
    relaxed, best = (solve(problem, relaxed=relaxed) for relaxed in (True, False))
    assert best is None or relaxed is not None
    if best is None or relaxed is None:
        return
    assert relaxed.step_seconds <= best.step_seconds * SOLVER
    placement = placement_of(graph, best.values)
    # The toys' rows are a large part of their memory, so only the other rules are looked at.
    case = Case(graph, quickened(prices), placement)
    verify(case.programs, graph, ROOMY, NodeSharing(1))
    values = decisions_of(graph, placement)
    # What the solver promises is below what its decisions take: it may call a ring larger than its
    # users, which the time rows then count on.
    assert best.step_seconds <= problem.step_seconds(values) * SOLVER
    assert best.step_seconds <= case.timeline.seconds * SOLVER
    for row in problem.capacities:
        assert row.used.at(values) <= row.limit * SOLVER


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_ample_memory_moves_nothing(pp: int) -> None:
    graph = toy_graph(Strategy(dp=2, pp=pp), blocks=4, units=4)
    solution = solve(formulate(enlarged(graph), quickened(COSTS)), rho=0.05)
    assert solution is not None
    expected = _without_zeros(placed(graph))
    assert placement_of(graph, solution.values) == expected


@pytest.mark.parametrize(
    ("short", "layers"),
    [
        (0, {Recompute.NONE: 4}),
        # A layer keeps 8 x 64 MiB, or 32 of 64 with selective recomputation, or 24 with the MLP's,
        # or 16 with full: the cheapest that is enough. What runs again needs workspace for what it
        # brings back.
        (1, {Recompute.NONE: 3, Recompute.SELECTIVE: 1}),
        (1040, {Recompute.SELECTIVE: 3, Recompute.MLP: 1}),
        (1250, {Recompute.MLP: 3, Recompute.FULL: 1}),
    ],
)
def test_recomputation_is_bought_only_for_memory(short: int, layers: dict[Recompute, int]) -> None:
    graph = enlarged(toy_graph(Strategy(dp=1, accumulation_group=8), blocks=4, units=1))
    used = lower(graph, placed(graph))[0].bytes_by_tier()
    # Nothing may leave the GPU: the host has room for what every plan has there.
    gpu, host = used[Tier.GPU] - short * 2**20, used[Tier.HOST]
    costs = with_capacity(quickened(COSTS), gpu=gpu, host=host, nvme=1)
    solution = solve(formulate(graph, costs))
    assert solution is not None
    block = placement_of(graph, solution.values).stages[0].kinds["block"]
    assert block.activations == {policy: {Tier.GPU: n} for policy, n in layers.items()}


def test_nothing_fits() -> None:
    graph = toy_graph()
    assert solve(formulate(graph, with_capacity(COSTS, gpu=10))) is None


def test_rounding_keeps_the_sum() -> None:
    shares = {Tier.GPU: 1.00000001, Tier.HOST: 1.3333333333, Tier.NVME: 1.6666666566}
    assert rounded(shares, 4) == {Tier.GPU: 1.0, Tier.HOST: 1.333333, Tier.NVME: 1.666667}
    assert rounded({Tier.GPU: 4.0, Tier.HOST: 1e-9, Tier.NVME: 0.0}, 4) == {Tier.GPU: 4.0}


def test_the_model_is_the_same_every_time() -> None:
    graph = toy_graph(Strategy(dp=2, pp=2, zero=3))
    away = placed(graph, block=kind_placement(2, Tier.HOST, optimizer=Tier.HOST))
    assert decisions_of(graph, away) == decisions_of(graph, away)
    first, again = formulate(graph, COSTS), formulate(graph, COSTS)
    assert repr(first) == repr(again)


def _without_an_mlp(graph: Graph) -> Graph:
    """The graph whose blocks have nothing that recomputing the MLP would run again."""
    block = graph.kinds["block"]
    reruns = {**block.reruns, Recompute.MLP: block.reruns[Recompute.SELECTIVE]}
    return replace(graph, kinds={**graph.kinds, "block": replace(block, reruns=reruns)})


@pytest.mark.parametrize("pp", [1, 2])
def test_ways_to_recompute_that_are_the_same_count_once(pp: int) -> None:
    graph = _without_an_mlp(enlarged(toy_graph(Strategy(dp=1, pp=pp))))
    problem = formulate(graph, quickened(COSTS))
    assert problem.spare
    assert all(".block." in name and "mlp" in name.split(".") for name in problem.spare)
    both = (problem, replace(problem, spare=frozenset()))
    few, every = (list(relaxed_steps(each, (0.0, 0.2))) for each in both)
    assert few == pytest.approx(every, rel=1e-6)


def test_a_pin_may_name_a_way_that_is_the_same_as_another() -> None:
    graph = _without_an_mlp(toy_graph())
    block = graph.kinds["block"]
    assert list(graph.repeated_ways(block)) == [Recompute.MLP]
    pins = (Pin("block", "recompute", Recompute.MLP, None),)
    solution = solve(pinned(formulate(graph, COSTS), graph, COSTS, pins))
    assert solution is not None
    activations = placement_of(graph, solution.values).stages[0].kinds["block"].activations
    assert set(activations) == {Recompute.MLP}
    others = (Pin("head", "recompute", Recompute.MLP, None),)
    assert pinned(formulate(graph, COSTS), graph, COSTS, others).spare
