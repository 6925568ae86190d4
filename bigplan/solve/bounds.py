"""Cheap lower bounds of a strategy's step, without a solver.

`cheap_bound` is arithmetic and the pipeline. `memory_outlook` adds what the GPU's memory costs: the
bytes that do not fit must be saved somehow, and each way to save them takes a step so long.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from bigplan.cost import Costs
from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.lower.layout import STAGING
from bigplan.placement import SLOTS, Tier
from bigplan.solve.memory import gradient_bytes, hidden_bytes, owned, weight_bytes
from bigplan.solve.stage import StageClass, stage_classes
from bigplan.solve.times import StageTimes

EXPOSED = 0.5  # of the moves' seconds: what simulations come to
HALVINGS = 30  # of the interval that holds the least step with enough room


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


def memory_outlook(graph: Graph, costs: Costs) -> Outlook:
    """Bound and estimate that know the GPU's memory; infinite where no plan fits."""
    bound = estimate = cheap_bound(graph, costs)
    for times, before in _classes(graph, costs):
        room = _Room.of(times, before + graph.units * _compute(times))
        bound = max(bound, _least_step(room, bound))
        estimate = max(estimate, room.usual_step())
    return Outlook(bound, max(bound, estimate))


def _classes(graph: Graph, costs: Costs) -> list[tuple[StageTimes, float]]:
    """Every class, and the seconds before its last stage's first work and after its last."""
    before = 0.0
    found = []
    for stage in stage_classes(graph):
        times = StageTimes(stage, costs)
        hop = times.forward_hop() + times.backward_tail().constant + 2 * costs.send
        before += (len(stage.stages) - 1) * hop
        found.append((times, before))
        before += hop
    return found


def _compute(times: StageTimes) -> float:
    # The constant: every variable of the backward's expression is a recomputation.
    return times.forward_compute() + times.backward_compute().constant


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes of a class of stages, and what a step of so many seconds can save.

    Every way to save bytes is taken as if it had its lanes for itself, and had to pay for nothing
    but them: a relaxation of the placement problem, so its least step is a bound.
    """

    surplus: float  # bytes above the GPU's capacity, everything on it and nothing recomputed
    start: float  # seconds of a step that recomputes nothing
    recomputed: tuple[tuple[float, float], ...]  # by kind: bytes saved at most, and per second
    kept: float  # bytes of activations that can leave, or be recomputed
    saved_ahead: float  # of them: in rings while a step does no transfers for them
    saved: float  # and per second
    ways: tuple[tuple[float, float, float], ...]  # bytes at most, free of time, per second
    elsewhere: float  # bytes of host memory
    disk: float  # bytes per second to NVMe
    disk_space: float

    @classmethod
    def of(cls, times: StageTimes, start: float) -> _Room:
        """The room of a class whose compute takes `start` seconds."""
        stage, rates, capacity = times.stage, times.costs.rates, times.costs.capacity
        kinds, ranks = list(stage.kinds), times.costs.ranks_per_node
        storing = [(k, n) for k, n in kinds if k.stores_activations]
        units_held = stage.held / times.group
        pairs = times.units - stage.graph.in_flight_units(stage.stages[-1])
        ring = (SLOTS - 1) * sum(k.saved for k, _ in storing) / rates.d2h
        there_and_back = 1 / rates.d2h + 1 / rates.h2d
        return cls(
            surplus=sum(_bytes(stage, k, n) for k, n in kinds)
            + max(k.workspace(Recompute.NONE) for k, _ in kinds)
            + hidden_bytes(stage)
            - capacity[Tier.GPU],
            start=start,
            recomputed=tuple(
                (
                    n * stage.held * (k.saved - k.boundary),
                    stage.held
                    * (k.saved - k.boundary)
                    / (times.units * times.group * times.costs.kinds[k.name].forward),
                )
                for k, n in storing
            ),
            kept=float(sum(n * stage.held * k.saved for k, n in storing)),
            saved_ahead=units_held * ring / there_and_back if pairs else 0.0,
            saved=units_held
            * (1 / (pairs * there_and_back) if pairs else min(rates.h2d, rates.d2h) / times.units),
            ways=tuple(_ways(times, kinds)),
            elsewhere=capacity[Tier.HOST] / ranks,
            disk=rates.nvme_write if capacity[Tier.NVME] else 0.0,
            disk_space=capacity[Tier.NVME] / ranks,
        )

    def room(self, step: float) -> float:
        """Bytes that a step of so many seconds can save at most."""
        spare = max(0.0, step - self.start)
        again = sum(min(most, rate * spare) for most, rate in self.recomputed)
        activations = self.saved_ahead + self.saved * step
        moved = sum(min(most, free + rate * step) for most, free, rate in self.ways)
        away = min(
            moved + min(activations, self.kept),
            self.elsewhere + min(self.disk * step, self.disk_space),
        )
        return min(away + again, moved + self.kept)

    def usual_step(self) -> float:
        """Seconds of a step that saves the surplus in the cheapest ways, half of them exposed."""
        ways = [(most, 1 / rate) for most, rate in self.recomputed]
        ways += [(most, EXPOSED / rate) for most, _, rate in self.ways]
        ways += [(self.kept, EXPOSED / self.saved)]
        seconds, surplus = self.start, self.surplus
        for most, price in sorted(ways, key=lambda way: way[1]):
            seconds += price * max(0.0, min(most, surplus))
            surplus -= most
        return seconds


def _bytes(stage: StageClass, kind: LayerKind, count: int) -> float:
    entries = 1 if stage.is_loss(kind) else stage.held
    state = owned(stage, kind) * stage.graph.sizes.state
    home = weight_bytes(stage, kind) + gradient_bytes(stage, kind) + state + entries * kind.saved
    rings = 0.0
    if stage.sharded(kind, 3) > 1:
        rings += stage.ring(count) * kind.parameters * stage.graph.sizes.parameter
    if stage.sharded(kind, 2) > 1:
        rings += min(STAGING, count) * kind.parameters * stage.graph.sizes.gradient
    return count * home + rings


def _ways(
    times: StageTimes, kinds: list[tuple[LayerKind, int]]
) -> list[tuple[float, float, float]]:
    """Parameters, gradients and optimizer state: bytes at most, free of time, per second."""
    stage, rates, units = times.stage, times.costs.rates, times.units
    state = stage.graph.sizes.state
    rows = float(sum(n * owned(stage, k) for k, n in kinds))
    ways = [(rows * state, 0.0, rates.cpu_update * state)]
    free = [(k, n) for k, n in kinds if not k.pinned]
    gradients = sum(n * gradient_bytes(stage, k) for k, n in free)
    ways.append((float(gradients), 0.0, rates.d2h / units))
    if stage.graph.strategy.zero not in (1, 2):
        # A slot ring holds as many whole layers as it saves transfers, unless ZeRO-3 has it anyway.
        # The loss layer's parameters pass once a unit, the others' twice.
        for k, n in free:
            nbytes = weight_bytes(stage, k)
            ahead = stage.ring(n) * nbytes if stage.sharded(k, 3) > 1 else 0
            passes = units if stage.is_loss(k) else 2 * units
            ways.append((float(n * nbytes), float(ahead), rates.h2d / passes))
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
