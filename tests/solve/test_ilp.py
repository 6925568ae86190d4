from __future__ import annotations

from collections.abc import Mapping

import pulp
import pytest

from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.solve import ilp
from bigplan.solve.candidate import Candidate, Workload
from bigplan.solve.formulation import formulate
from bigplan.solve.ilp import shortages, solve, solver_name
from bigplan.solve.linear import AtLeast, Capacity, Linear, Problem, Rule, Variable, total, var
from bigplan.solve.resolve import problem_of
from bigplan.solve.thresholds import NOISE
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.toys import COSTS, toy_graph, with_capacity

GIB = 1 << 30
SHORT: list[dict[str, int]] = [
    {"nvme": 0},
    {"host": 2 * GIB},
    {"gpu": 4 * GIB},
    {"nvme": 0, "host": 2 * GIB},
    {"nvme": 0, "gpu": 4 * GIB},
]


def _knapsack(limit: float, scale: float = 1.0) -> Problem:
    """Take three in all of a (5 s, 3 bytes) and b (2 s, 7 bytes)."""
    a, b = var("a"), var("b")
    return Problem(
        variables=(Variable("a", 3, True), Variable("b", 3, True)),
        rules=(Rule("three in all", a + b - 3, equal=True),),
        capacities=(Capacity("all", Tier.GPU, scale * (3 * a + 7 * b), scale * limit),),
        times=(AtLeast("step", 5 * a + 2 * b), AtLeast("step", Linear(constant=7.0))),
        serial=1.0 * b,
    )


@pytest.mark.parametrize("scale", [1.0, 1e12])  # bytes of a cluster are large numbers
@pytest.mark.parametrize(
    ("limit", "expected"),
    [(21, (0, 3, 7.0)), (17, (1, 2, 9.0)), (13, (2, 1, 12.0)), (9, (3, 0, 15.0))],
)
def test_a_knapsack(limit: float, expected: tuple[int, int, float], scale: float) -> None:
    solution = solve(_knapsack(limit, scale))
    assert solution is not None
    a, b, step = expected
    assert (round(solution.values["a"]), round(solution.values["b"])) == (a, b)
    assert solution.step_seconds == pytest.approx(step)
    assert set(solution.values) == {"a", "b"}


@pytest.mark.parametrize("highs", [True, False], ids=["HiGHS", "CBC"])
def test_a_search_that_ends_early_has_decisions_and_no_proof(
    highs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight kinds of items whose worth is about their weight take more than a node."""
    if not highs:
        monkeypatch.setattr(ilp, "highs_available", lambda: False)
    weights = (58, 86, 54, 66, 57, 63, 80, 98)
    worth = (65, 88, 61, 72, 60, 70, 83, 106)
    items = tuple(Variable(f"x{i}", 6, True) for i in range(8))
    taken = [var(item.name) for item in items]
    used = total([w * x for w, x in zip(weights, taken, strict=True)])
    gained = total([w * x for w, x in zip(worth, taken, strict=True)])
    left = AtLeast("step", -gained + 6 * sum(worth))
    capacities = (Capacity("all", Tier.GPU, used, 1405),)
    problem = Problem(items, (), capacities, (left,), Linear())
    best = solve(problem, gap=1e-6)
    assert best is not None
    assert best.proven
    monkeypatch.setattr(ilp, "NODES", 1)
    early = solve(problem, gap=1e-6)
    assert early is not None
    assert not early.proven
    assert early.step_seconds >= best.step_seconds * (1 - 1e-6)
    assert used.at(early.values) <= 1405 * (1 + 1e-6)


def test_relaxing_can_only_help_and_margins_only_hurt() -> None:
    problem = _knapsack(15)
    relaxed, whole, spare = solve(problem, relaxed=True), solve(problem), solve(problem, margin=0.3)
    assert relaxed is not None
    assert whole is not None
    assert spare is not None
    assert relaxed.step_seconds == pytest.approx(5 * 1.5 + 2 * 1.5)
    assert (whole.step_seconds, spare.step_seconds) == pytest.approx((12.0, 15.0))


def test_the_margin_is_given_up_where_nothing_else_fits() -> None:
    last_byte, spare = _knapsack(9), solve(_knapsack(9), margin=0.3)
    assert spare == solve(last_byte)
    assert spare is not None


def test_the_surcharge_breaks_ties_and_stays_out_of_the_step() -> None:
    problem = _knapsack(21)
    dear = solve(problem, rho=10.0)
    assert dear is not None
    assert round(dear.values["b"]) == 0
    assert (dear.step_seconds, dear.objective) == pytest.approx((15.0, 15.0))


def test_nothing_fits_and_by_how_much() -> None:
    problem = _knapsack(8)
    assert solve(problem) is None
    by_tier = {shortage.tier: shortage for shortage in shortages(problem)}
    assert by_tier[Tier.GPU].nbytes == pytest.approx(1.0)
    assert by_tier[Tier.GPU].stage == "all"


def test_a_rule_that_no_variable_can_keep() -> None:
    broken = _knapsack(21)
    impossible = Rule("false", Linear(constant=1.0))
    problem = Problem(
        broken.variables,
        (*broken.rules, impossible),
        broken.capacities,
        broken.times,
        broken.serial,
    )
    assert solve(problem) is None


def test_shortages_are_per_tier_alone() -> None:
    graph = toy_graph()
    short = {s.tier: s.nbytes for s in shortages(formulate(graph, with_capacity(COSTS, gpu=10)))}
    assert short[Tier.GPU] > 0
    # No amount of host memory replaces the hidden states and workspace on the GPU.
    assert Tier.HOST not in short


def test_the_solver_has_a_name_and_version() -> None:
    name, version = solver_name().split(" ", 1)
    assert name in ("HiGHS", "CBC")
    assert version


class _Blind:
    """A solver that finds every problem infeasible."""

    def available(self) -> bool:
        return True

    def actualSolve(self, model: pulp.LpProblem) -> None:
        model.assignStatus(pulp.LpStatusInfeasible)


def test_that_nothing_fits_is_for_two_solvers_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = solve(_knapsack(13))
    assert expected is not None
    monkeypatch.setattr(pulp, "HiGHS", lambda **options: _Blind())
    monkeypatch.setattr(ilp, "highs_available", lambda: True)
    found = solve(_knapsack(13))
    assert found is not None
    assert found.step_seconds == pytest.approx(expected.step_seconds)
    assert solve(_knapsack(13), below=1e3) is None  # with a cutoff the first one's word will do
    assert solve(_knapsack(8)) is None
    by_tier = {shortage.tier: shortage.nbytes for shortage in shortages(_knapsack(8))}
    assert by_tier[Tier.GPU] == pytest.approx(1.0)


@pytest.mark.parametrize("short", SHORT, ids=str)
@pytest.mark.parametrize("cluster", ["h200-1x", "rtx-4090-workstation", "dgx-a100-40g"])
def test_two_solvers_agree_where_memory_is_missing(
    cluster: str, short: Mapping[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cutoff, which no plan reaches, HiGHS answers alone."""
    nodes = find_cluster(cluster).with_caps(**short).group
    training = Training(sequence_length=1024, global_batch=32)
    workload = Workload(find_model("llama-3-8b"), training, nodes)
    sharded = 3 if nodes.gpus > 1 else 0
    for strategy in (
        Strategy(dp=nodes.gpus, micro_batch=4),
        Strategy(dp=nodes.gpus, zero=sharded),
    ):
        problem = problem_of(Candidate.of(workload, strategy), ())
        with monkeypatch.context() as alone:
            found = solve(problem, 0.2, below=1e9)
            alone.setattr(ilp, "highs_available", lambda: False)
            other = solve(problem, 0.2)
        assert (found is None) == (other is None), strategy
        if found is not None and other is not None:
            assert found.objective == pytest.approx(other.objective, rel=2 * NOISE)
            assert found.values.keys() == other.values.keys()
