"""One strategy on its way through the search: priced, bounded, placed, lowered, checked, played."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from bigplan.cost import Costs, price
from bigplan.graph.build import build_graph
from bigplan.graph.graph import Graph, Recompute
from bigplan.graph.strategy import Ends, Strategy
from bigplan.lower import lower, lower_steady
from bigplan.placement import Placement, Rings, Tier
from bigplan.program import Program
from bigplan.simulate import Totals, step_seconds, total_seconds
from bigplan.solve.bounds import EXPOSED, Outlook
from bigplan.solve.formulation import formulate, placement_of
from bigplan.solve.ilp import BOUND_GAP, solve
from bigplan.solve.linear import Problem
from bigplan.solve.pins import Pin, rings_tried
from bigplan.solve.relaxation import relaxed_steps
from bigplan.solve.stage import ROOMY
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.verify import node_bytes, verify

# Surcharges on serial transfer seconds. Perfect overlap makes moving look free; the first is about
# what simulations come to, so it also ranks strategies.
SURCHARGES = (EXPOSED, 0.05)
MORE_SURCHARGES = (0.02,)  # for the best strategies
MARGIN = 1e-3  # of each tier, kept free for what rounding to whole rows and pages adds
MARGINS = (MARGIN, 10 * MARGIN)  # the second where the first is not enough


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


class Pricing:
    """Graphs and prices of a workload's strategies; what strategies share is made once.

    What a rank computes in a layer depends on tensor parallelism and the micro-batch alone, and
    takes most of the pricing.
    """

    def __init__(self, workload: Workload, recomputes: tuple[Recompute, ...]) -> None:
        self._workload = workload
        self._recomputes = recomputes
        self._graphs: dict[tuple[int | bool, ...], tuple[Graph, Costs]] = {}
        self._costs: dict[tuple[int | bool, ...], Costs] = {}

    def alike(self, strategy: Strategy) -> tuple[Graph, Costs]:
        """A graph and prices whose layers compute what the strategy's do."""
        alone = strategy.pp == 1
        key = (strategy.tp, strategy.micro_batch, alone, strategy.sequence_parallel)
        if key not in self._graphs:
            workload = self._workload
            graph = build_graph(workload.model, workload.training, strategy)
            graph = replace(graph, recomputes=self._recomputes)
            self._graphs[key] = graph, price(graph, workload.training, workload.nodes)
        return self._graphs[key]

    def ends(self, strategy: Strategy) -> Ends:
        """Seconds of the first and the last layer, in those of a layer between."""
        graph, costs = self.alike(strategy)
        first, block, last = (costs.kinds[graph.layers[i]] for i in (0, 1, -1))
        each = block.forward + block.backward
        return (first.forward + first.backward) / each, (last.forward + last.backward) / each

    def candidate(self, strategy: Strategy) -> Candidate:
        """The strategy with its graph and prices."""
        graph, _ = self.alike(strategy)
        count = strategy.micro_batches(self._workload.training)
        graph = replace(graph, strategy=strategy, micro_batches=count)
        return Candidate(strategy, graph, self._priced(graph))

    def _priced(self, graph: Graph) -> Costs:
        strategy = graph.strategy
        key = (strategy.dp, strategy.tp, strategy.pp, strategy.micro_batch, strategy.zero > 0)
        if key not in self._costs:
            idle = {
                name: replace(kind, forward=(), backward=(), cheap=())
                for name, kind in graph.kinds.items()
            }
            workload, (_, compute) = self._workload, self.alike(strategy)
            costs = price(replace(graph, kinds=idle), workload.training, workload.nodes)
            kinds = {
                name: replace(compute.kinds[name], reduce=cost.reduce, gather=cost.gather)
                for name, cost in costs.kinds.items()
            }
            self._costs[key] = replace(costs, kinds=kinds)
        return self._costs[key]


@dataclass(frozen=True, slots=True)
class Placed:
    """A candidate with a placement that passed the verifier, and its simulated step."""

    candidate: Candidate
    placement: Placement
    programs: tuple[Program, ...]
    seconds: float
    totals: Totals


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
    prices = candidate.graph, candidate.costs
    seconds, totals = step_seconds(programs, *prices), total_seconds(programs, *prices)
    return Placed(candidate, placement, programs, seconds, totals)


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
    busy = total_seconds(programs, graph, costs).by_lane
    return Trial(candidate, placement, seconds, busy)


def model_outlook(problem: Problem, below: float) -> Outlook:
    """Bound and estimate from linear programs, infinite where nothing fits.

    A bound that is not below `below` seconds needs no estimate, and is its own.
    """
    steps = relaxed_steps(problem, (0.0, SURCHARGES[0]))
    bound = next(steps)
    return Outlook(bound, bound if bound >= below else next(steps))


def resolve(
    candidate: Candidate,
    ways: Iterable[tuple[float, Rings]],
    pins: tuple[Pin, ...],
    best: Trial | None = None,
    below: float = inf,
) -> Trial | None:
    """The best plan of several surcharges and rings, and `best`; None where none fits.

    Plans that the model puts above `below` seconds, or above the best so far, are not tried.
    """
    for rho, rings in ways:
        problem = problem_of(candidate, pins, rings)
        for margin in MARGINS:
            most = min(below, best.seconds) if best else below
            solution = solve(problem, rho, margin=margin, below=most)
            if solution is None:
                break
            placement = placement_of(candidate.graph, solution.values, rings)
            if best and placement == best.placement:
                break
            trial = try_out(candidate, placement)
            if trial is not None:
                best = trial if best is None or trial.seconds < best.seconds else best
                break
    return best


def optimum(problem: Problem) -> float:
    """The integer optimum's step, below every plan; infinite where nothing fits."""
    solution = solve(problem, gap=BOUND_GAP)
    return inf if solution is None else solution.step_seconds * (1 - BOUND_GAP)


def problem_of(candidate: Candidate, pins: tuple[Pin, ...], rings: Rings = ROOMY) -> Problem:
    """The candidate's integer program for plans with these rings."""
    return formulate(candidate.graph, candidate.costs, pins, rings)


def bounding_problem(candidate: Candidate, pins: tuple[Pin, ...]) -> Problem:
    """The integer program whose optimum is below every plan, whatever its rings."""
    tried = rings_tried(pins)
    return formulate(candidate.graph, candidate.costs, pins, tried[0], tried[-1])
