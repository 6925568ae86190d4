"""One strategy on its way through the search: priced, bounded, placed, lowered, checked, played."""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.cost import Costs, price
from bigplan.errors import VerificationError
from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower
from bigplan.placement import Placement
from bigplan.program import Program
from bigplan.simulate import simulate
from bigplan.solve.formulation import formulate, placement_of
from bigplan.solve.ilp import solve
from bigplan.solve.linear import Problem
from bigplan.solve.pins import Pin
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.timeline import Timeline
from bigplan.verify import verify

RHO = 0.05  # surcharge on serial transfer seconds: improved the simulated plan by 0.4-14%
MARGIN = 1e-3  # of each tier, kept free for what rounding to whole rows and pages adds


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be trained, and on which nodes."""

    model: ModelSpec
    training: Training
    nodes: NodeGroup


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy with its graph and prices."""

    strategy: Strategy
    graph: Graph
    costs: Costs

    @classmethod
    def of(cls, workload: Workload, strategy: Strategy) -> Candidate:
        """Build and price the strategy."""
        graph = build_graph(workload.model, workload.training, strategy)
        return cls(strategy, graph, price(graph, workload.training, workload.nodes))


@dataclass(frozen=True, slots=True)
class Placed:
    """A candidate with a placement that passed the verifier, and its simulated step."""

    candidate: Candidate
    placement: Placement
    programs: tuple[Program, ...]
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Simulated seconds of a step."""
        return self.timeline.seconds


def play(candidate: Candidate, placement: Placement) -> Placed:
    """Lower, verify and simulate. Raises VerificationError where the placement does not fit."""
    programs = lower(candidate.graph, placement)
    verify(
        programs, candidate.graph, candidate.costs.capacity, candidate.costs.ranks_per_node
    )
    timeline = simulate(programs, candidate.graph, candidate.costs)
    return Placed(candidate, placement, programs, timeline)


@dataclass(frozen=True, slots=True)
class Resolved:
    """A strategy's model optimum (a bound on all its plans) and its best plan, if one was found."""

    bound: float
    placed: Placed | None


def resolve(candidate: Candidate, problem: Problem) -> Resolved | None:
    """Solve the integer program with and without the surcharge; None where nothing fits."""
    best = solve(problem)
    if best is None:
        return None
    solutions = [solve(problem, rho, margin=MARGIN) for rho in (RHO, RHO / 10)]
    placements = [placement_of(candidate.graph, s.values) for s in solutions if s is not None]
    played = []
    for i, placement in enumerate(placements):
        if placement in placements[:i]:
            continue
        try:
            played.append(play(candidate, placement))
        except VerificationError:
            # Whole rows, pages and rings rounded a placement above a tier that it fills to the
            # last bytes; the other surcharge's placement, or another strategy, takes its place.
            continue
    return Resolved(best.step_seconds, min(played, key=lambda p: p.seconds, default=None))


def relaxed_bound(problem: Problem) -> float | None:
    """The LP relaxation's step, below every plan of the strategy; None where nothing fits."""
    solution = solve(problem, relaxed=True)
    return None if solution is None else solution.step_seconds


def problem_of(candidate: Candidate, pins: tuple[Pin, ...]) -> Problem:
    """The candidate's integer program."""
    return formulate(candidate.graph, candidate.costs, pins)
