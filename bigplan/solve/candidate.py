"""One strategy on its way through the search: priced, bounded, placed, lowered, checked, played."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from bigplan.cost import Costs, price
from bigplan.graph.graph import Graph
from bigplan.graph.strategy import Ends, Strategy
from bigplan.lower import lower, lower_steady
from bigplan.placement import KindPlacement, Placement, Rings, StagePlacement, Tier
from bigplan.program import Program
from bigplan.simulate import Totals, step_seconds, total_seconds
from bigplan.solve.alike import ROOMY
from bigplan.solve.bounds import Outlook
from bigplan.solve.formulation import formulate, placement_of
from bigplan.solve.ilp import BOUND_GAP, GAP, solve
from bigplan.solve.linear import Problem
from bigplan.solve.loss import LossLayer, idle
from bigplan.solve.pins import STREAMED, Pin, rings_tried
from bigplan.solve.relaxation import relaxed_steps
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.verify import node_bytes, verify

# Surcharges on serial transfer seconds. Perfect overlap makes moving look free; the first is about
# what simulations come to, so it also ranks strategies: of 22 plans for one to eight GPUs, a tenth
# gave slower ones than a fifth in seven, by 9% at most, and faster ones in four, by 1.7% at most.
# The second is tried too: by a fifth, a GiB of activations there and back costs 8 ms on an H200
# and spares 7.
SURCHARGES = (0.2, 0.05)
MORE_SURCHARGES = (0.02, 0.005)  # for the best strategies
# Parts of the CPU's rate beside copies, as measured before, that are reached, and how often. Of 75
# runs the slowest fifth had 0.76 in the middle, the next 0.86, the others 0.95 and more, as hosts
# change; copies to the host beside it had 0.82 to 1.04, in the mean of five runs the same 0.9
# (benchmarks/cpu_reached.py). Up to a hundredth of a step is paid for being ready.
REACHED = ((1.0, 0.6), (0.86, 0.2), (0.76, 0.2))
PREMIUM = 0.01
STREAMED_BESIDES = (-0.1, -0.05, 0.05, 0.1, 0.15, 0.2)  # parts of the state in host memory, to try
STREAMED_LAST = (0.0, 0.25, 0.5, 0.75, 1.0)  # and of the last layer's, which is one
LOSS_GAIN = 0.01  # of a step that larger chunks of the loss must save, to be made room for
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
    """A strategy with its graph and prices, below those of every plan until it is settled."""

    strategy: Strategy
    graph: Graph
    costs: Costs
    loss: LossLayer | None = field(default=None, compare=False)

    def hindered(self, reached: float) -> Candidate:
        """The same where the CPU's updates and copies beside reach this part of their rates."""
        rates = self.costs.rates
        slower = replace(
            rates,
            cpu_update=reached * rates.cpu_update,
            state_in=reached * rates.state_in,
            state_out=reached * rates.state_out,
        )
        return replace(self, costs=replace(self.costs, rates=slower))

    def beside_update(self) -> Candidate:
        """The same where all that leaves the GPU does so as beside the CPU's updates."""
        rates = self.costs.rates
        slower = replace(rates, d2h=min(rates.d2h, rates.state_out))
        return replace(self, costs=replace(self.costs, rates=slower))

    @classmethod
    def of(cls, workload: Workload, strategy: Strategy) -> Candidate:
        """Build and price the strategy."""
        loss = LossLayer.of(workload.model, workload.training, workload.nodes, strategy)
        graph = loss.relaxed_graph()
        return cls(strategy, graph, price(graph, workload.training, workload.nodes), loss)

    def settled(self, placement: Placement) -> Candidate:
        """With the loss layer as the placement has it."""
        if self.loss is None:
            return self
        graph, costs = self.loss.settled(self.graph, self.costs, placement.loss_chunk)
        return replace(self, graph=graph, costs=costs)

    def saved_by(self, chunk: int, before: int) -> float:
        """Seconds of a step that the loss is faster by so many tokens at a time than `before`."""
        assert self.loss is not None
        one, other = (self.loss.settled(self.graph, self.costs, c)[1] for c in (chunk, before))
        name = self.graph.layers[-1]
        shorter = other.kinds[name].backward - one.kinds[name].backward
        return self.graph.micro_batches * shorter


class Pricing:
    """Graphs and prices of a workload's strategies; what strategies share is made once.

    What a rank computes in a layer depends on tensor parallelism and the micro-batch alone, and
    takes most of the pricing.
    """

    def __init__(self, workload: Workload, pins: tuple[Pin, ...] = ()) -> None:
        self._workload = workload
        self._pins = pins
        self._graphs: dict[tuple[int | bool, ...], tuple[Graph, Costs]] = {}
        self._losses: dict[tuple[int | bool, ...], LossLayer] = {}
        self._costs: dict[tuple[int | bool, ...], Costs] = {}

    def alike(self, strategy: Strategy) -> tuple[Graph, Costs]:
        """A graph and prices whose layers compute what the strategy's do."""
        key = _alike(strategy)
        if key not in self._graphs:
            graph, workload = self._loss(strategy).relaxed_graph(), self._workload
            self._graphs[key] = graph, price(graph, workload.training, workload.nodes)
        return self._graphs[key]

    def _loss(self, strategy: Strategy) -> LossLayer:
        key, workload = _alike(strategy), self._workload
        if key not in self._losses:
            self._losses[key] = LossLayer.of(
                workload.model, workload.training, workload.nodes, strategy, self._pins
            )
        return self._losses[key]

    def ends(self, strategy: Strategy) -> Ends:
        """Seconds of the first and the last layer, in those of a layer between.

        The loss counts in its smallest chunks: a split that leaves it more time than it needs is
        one more to choose from.
        """
        loss = self._loss(strategy)
        graph, costs = loss.settled(*self.alike(strategy), loss.chunks[0])
        first, block, last = (costs.kinds[graph.layers[i]] for i in (0, 1, -1))
        each = block.forward + block.backward
        return (first.forward + first.backward) / each, (last.forward + last.backward) / each

    def candidate(self, strategy: Strategy) -> Candidate:
        """The strategy with its graph and prices."""
        graph, _ = self.alike(strategy)
        count = strategy.micro_batches(self._workload.training)
        graph = replace(graph, strategy=strategy, micro_batches=count)
        return Candidate(strategy, graph, self._priced(graph), self._loss(strategy))

    def _priced(self, graph: Graph) -> Costs:
        strategy = graph.strategy
        key = (strategy.dp, strategy.tp, strategy.pp, strategy.micro_batch, strategy.zero > 0)
        if key not in self._costs:
            workload, (_, compute) = self._workload, self.alike(strategy)
            costs = price(idle(graph), workload.training, workload.nodes)
            kinds = {
                name: replace(compute.kinds[name], reduce=cost.reduce, gather=cost.gather)
                for name, cost in costs.kinds.items()
            }
            self._costs[key] = replace(costs, kinds=kinds)
        return self._costs[key]


def _alike(strategy: Strategy) -> tuple[int | bool, ...]:
    """Equal for strategies whose ranks compute the same in every layer."""
    return strategy.tp, strategy.micro_batch, strategy.pp == 1, strategy.sequence_parallel


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate with a placement that fits, and its simulated step without the events."""

    candidate: Candidate
    placement: Placement
    seconds: float
    totals: Totals

    @property
    def settled(self) -> Candidate:
        """The candidate as the placement has it."""
        return self.candidate.settled(self.placement)

    @property
    def moves(self) -> bool:
        """Whether anything leaves the GPUs, and so passes through rings."""
        return any(kind.moves for stage in self.placement.stages for kind in stage.kinds.values())

    @property
    def busy(self) -> Mapping[str, float]:
        """The busiest stage's seconds per lane."""
        return self.totals.by_lane


@dataclass(frozen=True, slots=True)
class Placed(Trial):
    """A trial, its candidate settled, whose whole programs passed the verifier."""

    programs: tuple[Program, ...]


def verified(trial: Trial) -> Placed:
    """The trial, lowered in full. Raises VerificationError where its programs break a rule."""
    candidate, placement = trial.settled, trial.placement
    programs = lower(candidate.graph, placement)
    verify(programs, candidate.graph, candidate.costs.capacity, candidate.costs.ranks_per_node)
    return Placed(candidate, placement, trial.seconds, trial.totals, programs)


def try_out(candidate: Candidate, placement: Placement) -> Trial | None:
    """Simulate a placement; None where its program's buffers do not fit.

    Rounding to whole rows, pages and rings can carry a placement above a tier that it fills to
    the last bytes. The loss takes as many tokens at a time as what is left of the GPU allows.
    """
    costs = candidate.costs
    programs = lower_steady(candidate.graph, placement)
    for tier in Tier:
        ranks = 1 if tier is Tier.GPU else costs.ranks_per_node
        if node_bytes(programs, tier, ranks) > costs.capacity[tier]:
            return None
    if candidate.loss is not None:
        free = costs.capacity[Tier.GPU] - node_bytes(programs[-1:], Tier.GPU, 1)
        chunk = candidate.loss.fitting(programs[-1], free, costs.reserve)
        placement = placement.model_copy(update={"loss_chunk": chunk})
    settled = candidate.settled(placement)
    seconds = step_seconds(programs, settled.graph, settled.costs)
    totals = total_seconds(programs, settled.graph, settled.costs)
    return Trial(candidate, placement, seconds, totals)


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
            if best and _same_but_loss(placement, best.placement):
                break
            trial = try_out(candidate, placement)
            if trial is not None:
                best = trial if best is None or trial.seconds < best.seconds else best
                break
    return best


def with_larger_chunks(trial: Trial, pins: tuple[Pin, ...]) -> Trial:
    """The trial, or a plan of its strategy that leaves room for more of the loss at a time.

    The integer program counts on the time of the most tokens and the memory of the fewest, so what
    it fills may be worth less than a larger chunk.
    """
    candidate, rings = trial.candidate, Rings.of(trial.placement)
    for chunk in candidate.loss.chunks if candidate.loss else ():
        shorter = candidate.saved_by(chunk, trial.placement.loss_chunk)
        if shorter > LOSS_GAIN * trial.seconds:
            larger = candidate.settled(trial.placement.model_copy(update={"loss_chunk": chunk}))
            found = resolve(larger, [(rho, rings) for rho in SURCHARGES], pins, trial)
            if found is None or found is trial:
                break
            trial = replace(found, candidate=candidate)
    return trial


def with_cpu_to_spare(trial: Trial, pins: tuple[Pin, ...]) -> Trial:
    """The trial, or a plan that streams more or less of the state and is less at the CPU's mercy.

    The model lets the CPU's update end just when it must, and lets activations leave beside it as
    fast as alone. So a step is longer where they do not, or where the CPU reaches less than
    measured, as it does beside a machine's neighbours. Taken is what is fastest as a rule, by
    REACHED, of plans that stream more or less and of those made for slower updates and copies.
    """
    pinned = any(pin.tensor == STREAMED for pin in pins)
    if pinned or expected_seconds(trial) < trial.seconds * (1 + GAP):
        return trial
    most = trial.seconds * (1 + PREMIUM)
    besides = [_streaming_more(trial.placement, part) for part in STREAMED_BESIDES]
    ways = [(rho, Rings.of(trial.placement)) for rho in SURCHARGES]
    slower = (trial.candidate.hindered(reached).beside_update() for reached, _ in REACHED)
    resolved = (resolve(candidate, ways, pins) for candidate in slower)
    found = [found.placement for found in resolved if found]
    trial = _fastest_as_a_rule(trial, [*besides, *found], most)
    last = [_streaming_last(trial, part) for part in STREAMED_LAST]
    return _fastest_as_a_rule(trial, last, most)


def _fastest_as_a_rule(trial: Trial, placements: Iterable[Placement], most: float) -> Trial:
    """The trial, or the plan of these that is expected to be faster and promised below `most`."""
    least = expected_seconds(trial)
    tried = (try_out(trial.candidate, p) for p in placements if p != trial.placement)
    for found in [found for found in tried if found and found.seconds < most]:
        if (expected := expected_seconds(found)) < least:
            trial, least = found, expected
    return trial


def expected_seconds(trial: Trial) -> float:
    """The mean of a step's seconds over the rates that the CPU may reach."""
    total = 0.0
    for reached, part in REACHED:
        slower = trial.candidate.hindered(reached)
        found = trial if reached == 1.0 else try_out(slower, trial.placement)
        total += part * (found.seconds if found else inf)
    return total


def _streaming_more(placement: Placement, part: float) -> Placement:
    """The placement with this part of the state in host memory streamed besides, or less."""

    def more(_: str, kind: KindPlacement) -> float:
        return kind.streamed + part * kind.optimizer.get(Tier.HOST, 0.0) if kind.streamed else 0.0

    return _streaming(placement, more)


def _streaming_last(trial: Trial, part: float) -> Placement:
    """The trial's placement with this part of the last layer's state streamed.

    The integer program adds up what a forward moves, and does not see when: that layer is updated
    while the last activations leave, and chunks go before these.
    """

    def streamed(name: str, kind: KindPlacement) -> float:
        return part if name == last else kind.streamed

    last = trial.candidate.graph.layers[-1]
    return _streaming(trial.placement, streamed)


def _streaming(placement: Placement, streamed: Callable[[str, KindPlacement], float]) -> Placement:
    """The placement with so many layers' state of each kind streamed, as far as there is some."""

    def changed(name: str, kind: KindPlacement) -> KindPlacement:
        on_host = kind.optimizer.get(Tier.HOST, 0.0)
        most = min(on_host, kind.layers - kind.on_disk - kind.optimizer.get(Tier.GPU, 0.0))
        return kind.model_copy(update={"streamed": max(0.0, min(streamed(name, kind), most))})

    stages = (
        StagePlacement(kinds={name: changed(name, kind) for name, kind in stage.kinds.items()})
        for stage in placement.stages
    )
    return placement.model_copy(update={"stages": tuple(stages)})


def unmoved(trial: Trial, pins: tuple[Pin, ...]) -> Trial:
    """The trial, or where it is as fast the plan of its strategy that leaves all on the GPU.

    An integer program ends within GAP of its optimum, so it may move what need not be moved.
    """
    candidate, stages = trial.candidate, trial.placement.stages
    graph, sizes = candidate.graph, candidate.graph.sizes
    each = sizes.parameter + sizes.gradient + sizes.state
    least = sum(graph.kinds[name].parameters for name in graph.layers) * each / len(stages)
    if pins or not trial.moves or least > candidate.costs.capacity[Tier.GPU]:
        return trial
    still = tuple(
        StagePlacement(kinds={name: KindPlacement.on_gpu(kind.layers) for name, kind in kinds})
        for kinds in (stage.kinds.items() for stage in stages)
    )
    found = try_out(candidate, trial.placement.model_copy(update={"stages": still}))
    return found if found and found.seconds <= trial.seconds * (1 + GAP) else trial


def _same_but_loss(one: Placement, other: Placement) -> bool:
    """Equal, whatever is left of the GPU for the loss."""
    return one == other.model_copy(update={"loss_chunk": one.loss_chunk})


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
