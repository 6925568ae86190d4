"""One strategy on its way through the search: priced, bounded, placed, lowered, checked, played."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from bigplan.cost import Costs, price
from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph
from bigplan.graph.strategy import Strategy
from bigplan.lower import lower, lower_steady
from bigplan.placement import Placement, Tier
from bigplan.program import Program
from bigplan.simulate import busy_seconds, simulate, step_seconds
from bigplan.solve.bounds import EXPOSED, Outlook
from bigplan.solve.formulation import formulate, placement_of
from bigplan.solve.ilp import GAP, Relaxation, solve
from bigplan.solve.linear import Problem
from bigplan.solve.pins import Pin
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.timeline import Timeline
from bigplan.verify import node_bytes, verify

# Surcharges on serial transfer seconds. Perfect overlap makes moving look free; at the larger one
# half of every move is exposed, which is what simulations come to, so it also ranks strategies.
SURCHARGES = (EXPOSED, 0.05)
MORE_SURCHARGES = (0.2, 0.005, 0.0)  # for the best strategies
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


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate with a placement that fits, and its simulated step without the events."""

    candidate: Candidate
    placement: Placement
    seconds: float
    busy: Mapping[str, float]  # the busiest stage's seconds per lane


def play(candidate: Candidate, placement: Placement) -> Placed:
    """Lower, verify and simulate. Raises VerificationError where the placement does not fit."""
    programs = lower(candidate.graph, placement)
    verify(programs, candidate.graph, candidate.costs.capacity, candidate.costs.ranks_per_node)
    timeline = simulate(programs, candidate.graph, candidate.costs)
    return Placed(candidate, placement, programs, timeline)


def try_out(candidate: Candidate, placement: Placement) -> Trial | None:
    """Simulate a placement; None where its program's buffers do not fit.

    Rounding to whole rows, pages and rings can carry a placement above a tier that it fills to
    the last bytes.
    """
    graph, costs = candidate.graph, candidate.costs
    programs = lower_steady(graph, placement)
    for tier in Tier:
        ranks = 1 if tier is Tier.GPU else costs.ranks_per_node
        if node_bytes(programs, tier, ranks) > costs.capacity[tier]:
            return None
    seconds = step_seconds(programs, graph, costs)
    busy = busy_seconds(programs, graph, costs)
    return Trial(candidate, placement, seconds, busy)


def model_outlook(problem: Problem, below: float) -> Outlook:
    """Bound and estimate from linear programs, infinite where nothing fits.

    A bound that is not below `below` seconds needs no estimate, and is its own.
    """
    relaxation = Relaxation(problem)
    bound = relaxation.step_seconds(0.0)
    if bound >= below:
        return Outlook(bound, bound)
    return Outlook(bound, relaxation.step_seconds(SURCHARGES[0]))


def resolve(
    candidate: Candidate, problem: Problem, surcharges: tuple[float, ...], best: Trial | None = None
) -> Trial | None:
    """The best plan of the surcharges' and `best`; None where none fits."""
    for rho in surcharges:
        solution = solve(problem, rho, margin=MARGIN)
        if solution is None or (best and solution.step_seconds >= best.seconds):
            continue
        placement = placement_of(candidate.graph, solution.values)
        if best and placement == best.placement:
            continue
        trial = try_out(candidate, placement)
        if trial and (best is None or trial.seconds < best.seconds):
            best = trial
    return best


def optimum(problem: Problem) -> float:
    """The integer optimum's step, below every plan; infinite where nothing fits."""
    solution = solve(problem)
    return inf if solution is None else solution.step_seconds * (1 - GAP)


def problem_of(candidate: Candidate, pins: tuple[Pin, ...]) -> Problem:
    """The candidate's integer program."""
    return formulate(candidate.graph, candidate.costs, pins)
