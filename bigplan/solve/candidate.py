"""One strategy on its way through the search: priced, placed, lowered, checked, played."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from bigplan.cost import Costs, price
from bigplan.graph.graph import Graph
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import Ends
from bigplan.lower import lower, lower_buffers, lower_steady
from bigplan.placement import Placement, Rings, Tier, may_capture
from bigplan.program import Program
from bigplan.simulate import Totals, steps_seconds, total_seconds
from bigplan.solve.linear import Problem
from bigplan.solve.loss import LossLayer, idle
from bigplan.solve.pins import CAPTURED, Pin
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.units import PerRank
from bigplan.verify import rank_bytes, used_bytes, verify

# Shares of the CPU's measured rate beside copies that runs reach, and how often, because hosts
# change. Of 75 runs the slowest fifth had a median of 0.76, the next fifth 0.86, the others 0.95
# and more (benchmarks/cpu_reached.py). The two slow fifths count as one.
REACHED = ((1.0, 0.6), (0.81, 0.4))
FULLY = ((1.0, 1.0),)  # by plans that the CPU has no part in


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be trained, and on which nodes."""

    model: ModelSpec
    training: Training
    nodes: NodeGroup

    def on(self, gpus: int) -> Workload:
        """The same on so many GPUs: of whole nodes, or of the only node."""
        each, rest = divmod(gpus, self.nodes.gpus_per_node)
        assert each > 0 or self.nodes.nodes == 1
        fewer = {"gpus_per_node": rest} if each == 0 else {"nodes": each}
        return replace(self, nodes=self.nodes.model_copy(update=fewer))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy with its graph and prices; until it is settled they are below every plan's."""

    strategy: Strategy
    graph: Graph
    costs: Costs
    loss: LossLayer | None = field(default=None, compare=False)
    captured: bool | None = None  # whether plans have CUDA graphs; None: where they are faster
    # What `try_out` found: trials, and of slow placements the seconds alone; infinite: do not fit.
    # Integer programs and neighbours come to the same placement again and again.
    tried: dict[Placement, Trial | float] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    # What `problem_of` made: a program is solved at several surcharges and cutoffs.
    problems: dict[tuple[tuple[Pin, ...], Rings, int | None, Rings | None], Problem] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def hindered(self, reached: float) -> Candidate:
        """The same if the CPU's updates, and the copies beside them, reach this share of rates."""
        rates = self.costs.rates
        slower = replace(
            rates,
            cpu_update=PerRank(reached * rates.cpu_update),
            state_in=PerRank(reached * rates.state_in),
            state_out=PerRank(reached * rates.state_out),
        )
        return replace(self, costs=replace(self.costs, rates=slower))

    @staticmethod
    def of(workload: Workload, strategy: Strategy) -> Candidate:
        """Build and price the strategy."""
        return Pricing(workload).candidate(strategy)

    def settled(self, placement: Placement) -> Candidate:
        """With the loss layer and the launches that the placement has."""
        graph, costs = self.graph, self.costs
        if not placement.captured:
            costs = costs.launched()
        if self.loss is not None:
            graph, costs = self.loss.settled(graph, costs, placement.loss_chunk)
        return replace(self, graph=graph, costs=costs)

    def capturing(self, placement: Placement) -> bool:
        """Whether the placement is tried with CUDA graphs."""
        wanted = self.costs.captures if self.captured is None else self.captured
        return wanted and may_capture(self.graph, placement)


class Pricing:
    """Graphs and prices of a workload's strategies; shared parts are made once.

    A rank's work in a layer depends only on how layers are split and the micro-batch. Pricing this
    work takes most of the time.
    """

    def __init__(self, workload: Workload, pins: tuple[Pin, ...] = ()) -> None:
        self._workload = workload
        self._pins = pins
        self._graphs: dict[tuple[int | bool, ...], Graph] = {}
        self._idling: dict[tuple[int | bool, ...], Graph] = {}
        self._computing: dict[tuple[int | bool, ...], Costs] = {}
        self._losses: dict[tuple[int | bool, ...], LossLayer] = {}
        self._exchanges: dict[tuple[int | bool, ...], Costs] = {}  # of layers that compute nothing
        self._costs: dict[tuple[int | bool, ...], Costs] = {}

    def on(self, workload: Workload) -> Pricing:
        """For the workload on fewer nodes: the graphs are the same.

        Prices are not: the slowest of fewer GPUs is faster.
        """
        other = Pricing(workload, self._pins)
        other._graphs = self._graphs
        return other

    def alike(self, strategy: Strategy) -> tuple[Graph, Costs]:
        """A graph and prices whose layers compute what the strategy's do, and exchange nothing."""
        key, workload = _alike(strategy), self._workload
        graph = self._graph(strategy)
        if key not in self._computing:
            # The graph may be that of a strategy for more GPUs than these nodes have.
            mine = replace(graph, strategy=strategy)
            costs = price(mine, workload.training, workload.nodes)
            self._computing[key] = costs.without_sharing()
        return graph, self._computing[key]

    def _graph(self, strategy: Strategy) -> Graph:
        key = _alike(strategy)
        if key not in self._graphs:
            self._graphs[key] = self._loss(strategy).relaxed_graph()
        return self._graphs[key]

    def _loss(self, strategy: Strategy) -> LossLayer:
        key, workload = _alike(strategy), self._workload
        if key not in self._losses:
            self._losses[key] = LossLayer.of(
                workload.model, workload.training, workload.nodes, strategy, self._pins
            )
        return self._losses[key]

    def ends(self, strategy: Strategy) -> Ends:
        """Seconds of the first and the last layer, in those of a block.

        What first blocks of another kind take more or less than others counts in the first layer's.
        The loss counts in its smallest chunks, which are slowest. So some split leaves the loss
        more time than it needs; that split is only one more to choose from.
        """
        loss = self._loss(strategy)
        graph, costs = loss.settled(*self.alike(strategy), loss.chunks[0])
        seconds = {name: cost.forward + cost.backward for name, cost in costs.kinds.items()}
        first, *between, last = (seconds[name] for name in graph.layers)
        each = between[-1]
        return (first + sum(one - each for one in between)) / each, last / each

    def candidate(self, strategy: Strategy) -> Candidate:
        """The strategy with its graph and prices."""
        count = strategy.micro_batches(self._workload.training)
        graph = replace(self._graph(strategy), strategy=strategy, micro_batches=count)
        wanted = [bool(pin.amount) for pin in self._pins if pin.tensor == CAPTURED]
        captured = wanted[0] if wanted else None
        costs = self._priced(graph)
        if captured is False or not strategy.whole_passes:
            costs = costs.launched()
        return Candidate(strategy, graph, costs, self._loss(strategy), captured)

    def _priced(self, graph: Graph) -> Costs:
        strategy = graph.strategy
        split = strategy.dp, strategy.cp, strategy.tp, strategy.pp, strategy.ep
        sharing = strategy.zero > 0, strategy.zero_group
        # Virtual stages have more communicators, which leave less memory.
        exchanges = (*split, strategy.micro_batch, strategy.vpp > 1, *sharing)
        key = (*exchanges, strategy.zero, graph.units)
        if key not in self._costs:
            workload, (_, compute) = self._workload, self.alike(strategy)
            if exchanges not in self._exchanges:
                idle = self._idle(graph)
                self._exchanges[exchanges] = price(idle, workload.training, workload.nodes)
            costs = self._exchanges[exchanges]
            kinds = {
                name: compute.kinds[name].exchanging(cost, graph)
                for name, cost in costs.kinds.items()
            }
            self._costs[key] = replace(costs, kinds=kinds)
        return self._costs[key]

    def _idle(self, graph: Graph) -> Graph:
        key = _alike(graph.strategy)
        if key not in self._idling:
            self._idling[key] = idle(graph)
        return replace(graph, kinds=self._idling[key].kinds)


def _alike(strategy: Strategy) -> tuple[int | bool, ...]:
    """Equal for strategies whose ranks compute the same in every layer."""
    alone = strategy.pp == 1
    split = strategy.tp, strategy.cp, strategy.ep
    return *split, strategy.micro_batch, alone, strategy.sequence_parallel


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate with a placement that fits, and its simulated step without the events."""

    candidate: Candidate
    placement: Placement
    seconds: float
    expected: float  # the mean of a step's seconds over what the CPU reaches of its rates
    totals: Totals
    instructions: int  # of its programs: a simulation takes about 20 microseconds for each

    @property
    def settled(self) -> Candidate:
        """The candidate as the placement has it."""
        return self.candidate.settled(self.placement)

    @property
    def moves(self) -> bool:
        """Whether anything leaves the GPUs, and so passes through rings."""
        return moves(self.placement)

    @property
    def busy(self) -> Mapping[str, float]:
        """The busiest stage's seconds per lane."""
        return self.totals.by_lane


@dataclass(frozen=True, slots=True)
class Placed(Trial):
    """A trial, its candidate settled, whose whole programs passed the verifier."""

    programs: tuple[Program, ...]


def capacity_beside(programs: Sequence[Program], costs: Costs) -> Mapping[Tier, int]:
    """What each tier has for these programs."""
    return costs.beside(rank_bytes(programs, Tier.HOST))


def verified(trial: Trial) -> Placed:
    """The trial, lowered in full. Raises VerificationError where its programs break a rule."""
    candidate, placement = trial.settled, trial.placement
    costs, programs = candidate.costs, lower(candidate.graph, placement)
    verify(programs, candidate.graph, capacity_beside(programs, costs), costs.sharing)
    known = trial.seconds, trial.expected, trial.totals, trial.instructions
    return Placed(candidate, placement, *known, programs)


def try_out(candidate: Candidate, placement: Placement, below: float = inf) -> Trial | None:
    """Simulate a placement; None where its program's buffers do not fit, or not below `below` s.

    A placement may fill a tier to the last bytes. Rounding to whole rows, pages and rings can then
    exceed the tier. The loss takes as many tokens at a time as the GPU's free memory allows.
    """
    found = candidate.tried.get(placement)
    if found is None or (isinstance(found, float) and found < below):
        found = candidate.tried[placement] = _simulated(candidate, placement, below)
    return found if isinstance(found, Trial) and found.seconds < below else None


def _simulated(candidate: Candidate, placement: Placement, below: float) -> Trial | float:
    """The trial; where it is not below `below`, its seconds alone, infinite if it does not fit."""
    costs = candidate.costs
    if placement.captured:
        placement = placement.model_copy(update={"captured": False})
    fit, programs = partial(_fit, costs), None
    if candidate.capturing(placement):
        if not fit(lower_buffers(candidate.graph, placement)):
            return inf
        captured = placement.model_copy(update={"captured": True})
        programs = lower_steady(candidate.graph, captured, fit)
        placement = placement if programs is None else captured
    if programs is None:
        programs = lower_steady(candidate.graph, placement, fit)
    if programs is None or (candidate.captured and not placement.captured):
        return inf
    capacity = capacity_beside(programs, costs)
    if candidate.loss is not None:
        chunk = candidate.loss.fitting(programs, capacity[Tier.GPU], costs.reserve)
        placement = placement.model_copy(update={"loss_chunk": chunk})
    settled = candidate.settled(placement)
    reached = REACHED if moves(placement) else FULLY
    prices = (settled.hindered(part).costs for part, _ in reached)
    each = steps_seconds(programs, settled.graph, prices)
    seconds = next(each)
    if seconds >= below:
        return seconds
    totals = total_seconds(programs, settled.graph, settled.costs)
    shares = (share for _, share in reached)
    expected = sum(share * took for share, took in zip(shares, (seconds, *each), strict=True))
    instructions = sum(len(program.step) for program in programs)
    return Trial(candidate, placement, seconds, expected, totals, instructions)


def _fit(costs: Costs, programs: Sequence[Program]) -> bool:
    capacity = capacity_beside(programs, costs)
    return all(used_bytes(programs, tier, costs.sharing) <= capacity[tier] for tier in Tier)


def moves(placement: Placement) -> bool:
    """Whether anything leaves the GPUs, and so passes through rings."""
    return any(kind.moves for stage in placement.stages for kind in stage.kinds.values())
