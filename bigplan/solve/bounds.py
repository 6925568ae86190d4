"""Cheap lower bounds of a strategy's step, without a solver.

`cheap_bound` is arithmetic and the pipeline. `memory_outlook` adds the cost of the GPU's memory: a
plan must save the bytes that do not fit, and each way to save them takes seconds. Of pins it
knows those of activations; the others are for the linear programs to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

from bigplan.cost import Costs
from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import Rings, Tier
from bigplan.solve.alike import ROOMY
from bigplan.solve.ends import leading_seconds, trailing_seconds
from bigplan.solve.interleaved import opening_seconds
from bigplan.solve.memory import gradient_bytes, hidden_bytes, owned, weight_bytes, whole
from bigplan.solve.pins import Pin, pin_rules
from bigplan.solve.stage import StageClass, stage_classes
from bigplan.solve.stage_times import StageTimes
from bigplan.solve.thresholds import EXPOSED

Way = tuple[float, float]  # bytes that recomputing a layer saves, and seconds that it takes

HALVINGS = 30  # of the interval that holds the least step with enough room


def family_bound(graph: Graph, costs: Costs, micro_batches: int, stages: int) -> float:
    """Seconds of compute on layers like the graph's in so many stages, however they are cut.

    The slowest stage takes no less than the mean one, and has a whole number of layers.
    """
    each = {name: cost.forward + cost.backward for name, cost in costs.kinds.items()}
    between = graph.layers[1:-1]
    most = -(-len(between) // stages) * min(each[name] for name in set(between))
    mean = sum(each[name] for name in graph.layers) / stages
    return micro_batches * max(most, mean)


def cheap_bound(graph: Graph, costs: Costs) -> float:
    """Seconds that every plan of the strategy takes at least, nothing recomputed or moved."""
    bound = 0.0
    for times, before in _classes(graph, costs):
        bound = max(bound, before + graph.units * _compute(times))
        if graph.strategy.dp > 1:
            reduces = sum(count * times.reduce(kind) for kind, count in times.stage.kinds)
            bound = max(bound, reduces)
    return bound


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a strategy's step takes: at least, and as simulations will have it."""

    bound: float
    estimate: float


def memory_outlook(
    graph: Graph, costs: Costs, tried: tuple[Rings, ...] = (ROOMY,), pins: tuple[Pin, ...] = ()
) -> Outlook:
    """Bound and estimate that know the GPU's memory; infinite where no plan fits.

    `tried`: the rings that plans may have, most first.
    """
    bound = estimate = cheap_bound(graph, costs)
    for times, before in _classes(graph, costs, tried):
        kept = [_Kept.of(times.stage, kind, pins) for kind, _ in times.stage.kinds]
        if not all(each.recomputes for each in kept):
            return Outlook(inf, inf)
        room = _Room.of(times, kept, before + graph.units * _compute(times))
        bound = _least_step(room, max(bound, room.start))
        if bound == inf:
            return Outlook(inf, inf)
        estimate = max(estimate, room.usual_step())
    return Outlook(bound, max(bound, estimate))


def _classes(
    graph: Graph, costs: Costs, tried: tuple[Rings, ...] = (ROOMY,)
) -> list[tuple[StageTimes, float]]:
    """Every class, and the seconds before its last stage's first work and after its last."""
    before = 0.0
    found = list[tuple[StageTimes, float]]()
    for stage in stage_classes(graph, tried[0], tried[-1]):
        times = StageTimes(stage, costs)
        ends = leading_seconds(times) + trailing_seconds(times)
        before = before if found else ends  # every stage waits for what the first one does
        hop = _hop(times) + 2 * costs.send
        before += (len(stage.stages) - 1) * hop
        found.append((times, max(before, ends)))
        before += hop
    return found


def _hop(times: StageTimes) -> float:
    """Seconds from a unit's first micro-batch into a stage to it leaving, forward and backward."""
    if times.stage.interleaved:
        return sum(opening_seconds(times))
    backward, others = times.plain_backward, times.other_micro_batches(times.stage.counts[-1][0])
    return times.forward_hop() + max(backward - others, backward / times.group)


def _compute(times: StageTimes) -> float:
    return times.forward_compute + times.plain_backward


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes of a class of stages, and what a step of so many seconds can save.

    Each way to save bytes counts as if no other way used its lanes, and costs only their time.
    This relaxes the placement problem, so its least step is a bound.
    """

    surplus: float  # bytes above the GPU's capacity, everything on it and nothing recomputed
    start: float  # seconds of a step that recomputes nothing but what it must
    recomputed: tuple[tuple[float, float], ...]  # bytes saved at most, and per second
    kept: float  # bytes of activations that can leave, or be recomputed
    leaving: float  # the bytes of `kept` that can leave
    saved_ahead: float  # the bytes of `leaving` in rings, without transfers
    saved: float  # bytes of `leaving` per second of a step
    ways: tuple[tuple[float, float, float], ...]  # bytes at most, free of time, per second
    elsewhere: float  # bytes of host memory
    disk: float  # bytes per second to NVMe
    disk_space: float

    @classmethod
    def of(cls, times: StageTimes, kept: list[_Kept], start: float) -> _Room:
        """The room of a class whose compute takes `start` seconds, nothing recomputed."""
        stage, rates, capacity = times.stage, times.costs.rates, times.costs.capacity
        kinds, ranks = list(stage.kinds), times.costs.sharing.ranks
        storing = [k for k, _ in kinds if k.stores_activations]
        units_held = 0.0 if stage.interleaved else stage.held / times.group
        pairs = times.units - stage.graph.in_flight_units(stage.stages[-1])
        entries = sum(k.kept(policy) for k in storing for policy in stage.graph.recomputes)
        ring = stage.most.slots * entries / rates.d2h
        there_and_back = 1 / rates.d2h + 1 / rates.h2d
        return cls(
            surplus=sum(_bytes(stage, k, n) for k, n in kinds)
            + sum(k.nbytes for k in kept)
            + max(k.workspace for k in kept)
            + hidden_bytes(stage)
            - capacity[Tier.GPU],
            start=start
            + sum(stage.count(k.kind) * _again(times, k.kind, k.recomputes[0]) for k in kept),
            recomputed=tuple(way for k in kept for way in _recomputations(times, k)),
            kept=float(sum(k.nbytes - k.least for k in kept)),
            leaving=float(sum(k.nbytes for k in kept if k.leaves)),
            saved_ahead=units_held * ring / there_and_back if pairs else 0.0,
            saved=units_held
            * (1 / (pairs * there_and_back) if pairs else min(rates.h2d, rates.d2h) / times.units),
            ways=tuple(_ways(times)),
            elsewhere=capacity[Tier.HOST] / ranks,
            disk=rates.nvme_write if capacity[Tier.NVME] else 0.0,
            disk_space=capacity[Tier.NVME] / ranks,
        )

    def room(self, step: float) -> float:
        """Bytes that a step of so many seconds can save at most."""
        again = _bought(self.recomputed, max(0.0, step - self.start))
        activations = self.saved_ahead + self.saved * step
        moved = sum(min(most, free + rate * step) for most, free, rate in self.ways)
        away = min(
            moved + min(activations, self.leaving),
            self.elsewhere + min(self.disk * step, self.disk_space),
        )
        return min(away + again, moved + self.kept)

    def usual_step(self) -> float:
        """Seconds of a step that saves the surplus in the cheapest ways, exposed in part."""
        ways = [(most, 1 / rate) for most, rate in self.recomputed if most]
        ways += [(most, EXPOSED / rate) for most, _, rate in self.ways if most]
        ways += [(self.leaving, EXPOSED / self.saved)] if self.saved else []
        seconds, surplus = self.start, self.surplus
        for most, price in sorted(ways, key=lambda way: way[1]):
            seconds += price * max(0.0, min(most, surplus))
            surplus -= most
        return seconds


@dataclass(frozen=True, slots=True)
class _Kept:
    """Activations of a kind's layers, and the ways that pins leave to keep them."""

    kind: LayerKind
    entries: int  # micro-batches, of all layers
    recomputes: tuple[Recompute, ...]  # least first
    leaves: bool  # whether they may be elsewhere than on the GPU

    @classmethod
    def of(cls, stage: StageClass, kind: LayerKind, pins: tuple[Pin, ...]) -> _Kept:
        """A kind's activations, as known without a solver."""
        policies = _left(stage, kind, pins)
        left = {recompute for recompute, _ in policies}
        return cls(
            kind=kind,
            entries=sum(stage.entries(kind)),
            recomputes=tuple(recompute for recompute in Recompute if recompute in left),
            leaves=any(tier is not Tier.GPU for _, tier in policies),
        )

    @property
    def nbytes(self) -> int:
        """Bytes with as little recomputed as may be."""
        return self.entries * self.kind.kept(self.recomputes[0])

    @property
    def least(self) -> int:
        """Bytes that stay on the GPU however much leaves or is recomputed."""
        if self.leaves:
            return 0
        return self.entries * min(self.kind.kept(recompute) for recompute in self.recomputes)

    @property
    def workspace(self) -> int:
        """Bytes that every plan needs to work on a layer."""
        always = (Recompute.NONE, *(self.recomputes if len(self.recomputes) == 1 else ()))
        return max(self.kind.workspace(recompute) for recompute in always)


def _left(
    stage: StageClass, kind: LayerKind, pins: tuple[Pin, ...]
) -> tuple[tuple[Recompute, Tier], ...]:
    """The ways to keep activations that pins leave to some layer of the kind."""
    left = tuple(stage.policies(kind))
    if not pins or not kind.stores_activations:
        return left
    names = {way: frozenset(stage.policy(kind, *way).terms) for way in left}
    every = frozenset[str]().union(*names.values())
    for rule in pin_rules(stage, pins):
        pinned, amount = frozenset(rule.expression.terms), -rule.expression.constant
        if pinned and pinned <= every and amount <= 0:
            left = tuple(way for way in left if not names[way] <= pinned)
        elif pinned and pinned <= every and amount >= stage.count(kind):
            left = tuple(way for way in left if names[way] <= pinned)
    return left


def _again(times: StageTimes, kind: LayerKind, recompute: Recompute) -> float:
    """Seconds that recomputing a layer of the kind so adds to a step."""
    return times.units * times.group * times.costs.kinds[kind.name].again(recompute)


def _recomputations(times: StageTimes, kept: _Kept) -> list[tuple[float, float]]:
    """Bytes that recomputing a kind saves at most and per second, in steps of falling yield.

    A way is left out if a mixture of its two neighbours yields more.
    """
    kind, held, least = kept.kind, times.stage.held, kept.recomputes[0]
    ways = [(0.0, 0.0)]  # bytes and seconds of a layer, of those that hold most
    for recompute in kept.recomputes[1:]:
        saved = float(held * (kind.kept(least) - kind.kept(recompute)))
        way = saved, _again(times, kind, recompute) - _again(times, kind, least)
        while len(ways) > 1 and _yields_less(ways[-2], ways[-1], way):
            ways.pop()
        ways.append(way)
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ways)]
    mean = kept.entries / held
    return [(mean * saved, saved / seconds if seconds else inf) for saved, seconds in steps]


def _yields_less(a: Way, b: Way, c: Way) -> bool:
    """Whether b saves fewer bytes than a mixture of a and c that takes as many seconds."""
    return (b[0] - a[0]) * (c[1] - b[1]) < (c[0] - b[0]) * (b[1] - a[1])


def _bought(ways: tuple[tuple[float, float], ...], seconds: float) -> float:
    """Bytes that the best ways save in so many seconds of compute."""
    saved = 0.0
    for most, rate in sorted(ways, key=lambda way: -way[1]):
        taken = min(most, rate * seconds) if seconds and rate < inf else most * (rate == inf)
        saved += taken
        seconds -= taken / rate if rate < inf else 0.0
    return saved


def _bytes(stage: StageClass, kind: LayerKind, count: int) -> float:
    state = owned(stage, kind) * stage.graph.sizes.state
    home = weight_bytes(stage, kind) + gradient_bytes(stage, kind) + state
    rings = 0.0
    if stage.sharded(kind, 3) > 1:
        slots = 0 if stage.shares(kind) else min(stage.least.slots, count)
        rings += slots * whole(stage, kind) * stage.graph.sizes.parameter
    if stage.sharded(kind, 2) > 1:
        sums = 0 if stage.shares(kind) else min(stage.least.sums, count)
        rings += sums * whole(stage, kind) * stage.graph.sizes.gradient
    return count * home + rings


def _ways(times: StageTimes) -> list[tuple[float, float, float]]:
    """Parameters, gradients and optimizer state: bytes at most, free of time, per second."""
    stage, rates, units = times.stage, times.costs.rates, times.units
    state = stage.graph.sizes.state
    rows = float(sum(n * owned(stage, k) for k, n in stage.kinds))
    # State that leaves is updated by the CPU, or passes through the GPU.
    passing = min(rates.state_in, rates.state_out)
    ways = [(rows * state, 0.0, rates.cpu_update * state + passing)]
    free = [(k, n) for k, n in stage.kinds if not stage.resident(k, "gradients")]
    for looked_up in (False, True):
        kinds = [(k, n) for k, n in free if bool(k.looked_up) == looked_up]
        nbytes = sum(n * gradient_bytes(stage, k) for k, n in kinds)
        # Rows of tables move in hardly any time, here in none.
        ways.append((float(nbytes), float(nbytes) * looked_up, rates.d2h / units))
    if stage.graph.strategy.zero not in (1, 2) and not stage.interleaved:
        # A slot ring holds as many whole layers as it saves transfers, unless ZeRO-3 has it anyway.
        # The loss layer's parameters pass once a unit, the others' twice.
        for k, n in free:
            nbytes = weight_bytes(stage, k)
            most = n * nbytes
            held = stage.ring(n) * nbytes if stage.sharded(k, 3) > 1 else 0
            ahead = most if k.looked_up else held
            passes = units if stage.is_loss(k) else 2 * units
            ways.append((float(most), float(ahead), rates.h2d / passes))
    return ways


def _least_step(room: _Room, bound: float) -> float:
    """The least step, at least `bound`, that has room for the surplus; infinite if none has."""
    if bound == inf or room.surplus <= room.room(bound):
        return bound
    low, high = bound, 2 * bound
    while room.room(high) < room.surplus:
        if high > 1e6 * bound:
            return inf
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if room.room(middle) < room.surplus:
            low = middle
        else:
            high = middle
    return low
