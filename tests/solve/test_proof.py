"""What can be met is never proven to contradict itself, whatever the factors and the scales."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.graph.strategy import Strategy
from bigplan.solve import ilp
from bigplan.solve.candidate import Candidate, Workload
from bigplan.solve.ilp import solve
from bigplan.solve.linear import AtLeast, Linear, Problem, Rule, Variable
from bigplan.solve.linear_program import LinearProgram
from bigplan.solve.proof import contradict
from bigplan.solve.resolve import problem_of
from bigplan.solve.rows import Row, rows
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.examples import examples

GIB = 1 << 30
COLUMNS = ("a", "b", "c", "d")
Met = tuple[Problem, Mapping[str, float]]


@st.composite
def met(draw: st.DrawFn) -> Met:
    """A problem, and decisions that meet it; coefficients have up to 25 orders of magnitude."""
    uppers = {name: float(draw(st.integers(1, 100))) for name in COLUMNS}
    values = {name: draw(st.floats(0.0, uppers[name])) for name in COLUMNS}
    signs, mantissas, powers = st.sampled_from((-1, 1)), st.floats(0.1, 1.0), st.integers(-12, 13)
    sizes = st.builds(lambda sign, number, n: sign * number * 10.0**n, signs, mantissas, powers)
    rules = []
    for number in range(draw(st.integers(1, 8))):
        terms = {name: draw(sizes) for name in COLUMNS if draw(st.booleans())}
        equal, spare = draw(st.booleans()), draw(st.sampled_from((0.0, 1.0, 1e9)))
        constant = -Linear(terms).at(values) - (0.0 if equal else spare)
        rules.append(Rule(str(number), Linear(terms, constant), equal))
    variables = tuple(Variable(name, uppers[name], integer=False) for name in COLUMNS)
    times = (AtLeast("step", Linear({"a": 1.0}, 1.0)),)
    return Problem(variables, tuple(rules), (), times, Linear()), values


@settings(max_examples=examples(300))
@given(found=met(), data=st.data())
def test_what_can_be_met_is_not_contradictory(found: Met, data: st.DataObject) -> None:
    problem, _ = found
    every = list(rows(problem))
    upper = {v.name: v.upper for v in problem.variables} | {"step": inf}
    sizes = st.floats(-1e6, 1e6)
    factors = data.draw(st.lists(sizes, min_size=len(every), max_size=len(every)))
    for sign in (1.0, -1.0):
        assert not contradict(every, [sign * y for y in factors], upper)


@settings(max_examples=examples(300))
@given(found=met())
def test_a_solver_that_is_wrong_proves_nothing(found: Met) -> None:
    """Its factors are checked whatever it says of a problem that can be met."""
    program = LinearProgram(found[0])
    program.step_seconds(0.0)
    assert not program.contradictory()


@pytest.mark.parametrize(("apart", "proven"), [(1e-7, False), (1e-4, True), (1.0, True)])
def test_a_row_that_is_missed_by_less_than_solvers_allow_is_met(apart: float, proven: bool) -> None:
    every = [Row({"a": 1.0}, 1.0, "at most"), Row({"a": -1.0}, -1.0 - apart, "at least")]
    assert contradict(every, [1.0, 1.0], {"a": 5.0}) is proven
    assert not contradict(every, [1.0, -1.0], {"a": 5.0})  # no inequality counts backwards


def test_a_limit_on_a_column_is_part_of_the_proof() -> None:
    every = [Row({"a": -1.0, "b": -1.0}, -7.0, "seven in all")]
    assert contradict(every, [1.0], {"a": 3.0, "b": 3.0})
    assert not contradict(every, [1.0], {"a": 3.0, "b": 4.0})
    assert not contradict(every, [1.0], {"a": 3.0, "b": inf})


SHORT: list[dict[str, int]] = [
    {"nvme": 0},
    {"host": 2 * GIB},
    {"gpu": 4 * GIB},
    {"nvme": 0, "host": 2 * GIB},
    {"nvme": 0, "gpu": 4 * GIB},
]


@pytest.mark.parametrize("cluster", ["h200-1x", "rtx-4090-workstation"])
@pytest.mark.parametrize("model", ["gpt2-xl", "llama-like-5.5b", "llama-3-8b"])
def test_what_is_proven_is_what_another_solver_finds(
    model: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the time of a drive that is not there, which once made HiGHS wrong."""
    proven = 0
    for short in SHORT:
        nodes = find_cluster(cluster).with_caps(**short).group
        training = Training(sequence_length=1024, global_batch=32)
        workload = Workload(find_model(model), training, nodes)
        problem = problem_of(Candidate.of(workload, Strategy(dp=1, micro_batch=4)), ())
        for written in (problem, problem.without(problem.excluded)):
            program = LinearProgram(written)
            contradictory = program.step_seconds(0.0) == inf and program.contradictory()
            with monkeypatch.context() as alone:
                alone.setattr(ilp, "highs_available", lambda: False)
                other = solve(problem, relaxed=True)
            assert not (contradictory and other is not None)
            proven += contradictory
        assert contradictory == (other is None)  # where drives that are not there are left out
    assert proven or model == "gpt2-xl"
