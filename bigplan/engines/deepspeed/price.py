"""Seconds of a step as DeepSpeed runs it, one phase after the other.

The source is its code (0.19.8). d ranks shard the state; p is bytes a parameter, g bytes a summed
gradient, both of what a rank owns:

- Only ZeRO-3's fetch of the next block runs beside compute. Gradients leave through hooks of the
  backward that wait for each other's copies. The update starts when all gradients are there.
- Offloaded gradients, ZeRO 1 and 2: each micro-batch's gradients are added to the sum on the GPU.
  The first moves p bytes down, the others p up and p down, the last 4 more down in fp32. A step of
  one micro-batch moves only these 4. ZeRO 3: g down and g up for each, 4 down with the last.
- A pipeline's gradients are summed on the GPU and leave after the last backward: p and 4 down.
- Update on the CPU: the clip factor (8 bytes of host memory an element), AdamW (28), under ZeRO 1
  and 2 a cast (4 + p), then the parameters go up (p).
- State on drives: the backward writes the last gradients in fp32 (4). The update reads gradient,
  master and moments (16) one group ahead, and writes all but the gradient (12) one group behind.
- Parameters off the GPU come up for the forward, and again for the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from typing import NamedTuple

from bigplan.cost.costs import Costs
from bigplan.cost.framework import DEEPSPEED, NATIVE
from bigplan.cost.rates import ADAM_BYTES
from bigplan.cost.step import UPDATE_BYTES, hidden_by
from bigplan.engines.deepspeed.memory import GRADIENT, StageHoldings
from bigplan.graph.graph import Recompute
from bigplan.placement import Tier
from bigplan.program import Lane, Op
from bigplan.spec.cluster import NodeGroup
from bigplan.timeline import Event, Timeline, sums
from bigplan.units import PerNode, PerRank

# bigplan's layers in DeepSpeed's engine: torch's attention, plain torch otherwise, the native
# runtime's Python for each operator. ZeRO-3's hooks take what was measured for every tensor.
assert DEEPSPEED.host is not None
BEHAVIOUR = replace(
    DEEPSPEED,
    attention=NATIVE.attention,
    host=None,
    gather_launches=DEEPSPEED.gather_launches * DEEPSPEED.host,
)

CLIPPED_BYTES = 8  # the gradient read and written
ADAMW_BYTES = 28  # master and moments read and written, the gradient read
SWAPPED_BYTES = 16  # master, gradient and two moments
# Passes of the update on the GPU beside AdamW's own: gradients flattened (4), cast to fp32 (6),
# multiplied by the clip factor (8). AdamW's bytes include the norm.
PASSES_BYTES = 18


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds of one lane in a row, and bytes that it moves, for equal micro-batches."""

    op: Op
    micro_batch: int
    lane: Lane
    seconds: float
    nbytes: float = 0.0
    again: float = 0.0  # part of the seconds that recomputes
    times: int = 1  # equal micro-batches, from this one on


@dataclass(frozen=True, slots=True)
class PricedStep:
    """A step's phases, in order."""

    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(phase.times * phase.seconds for phase in self.phases)

    def by_lane(self) -> dict[str, float]:
        """Seconds of each lane; they add up to the step."""
        found = sums((phase.lane, phase.times * phase.seconds) for phase in self.phases)
        return {lane: seconds for lane, seconds in found.items() if seconds}

    busy = on_busiest = by_lane

    @property
    def again(self) -> float:
        """Seconds of recomputation."""
        return sum(phase.times * phase.again for phase in self.phases)

    def by_op(self) -> dict[str, float]:
        """Seconds of each kind of action."""
        return sums((phase.op, phase.times * phase.seconds) for phase in self.phases)

    def moved(self) -> dict[str, int]:
        """Bytes through each link."""
        moving = (phase for phase in self.phases if phase.nbytes)
        found = sums((phase.lane, phase.times * phase.nbytes) for phase in moving)
        return {lane: round(found[lane]) for lane in sorted(found)}

    def timeline(self) -> Timeline:
        """The grain that the worker measures: a micro-batch's forward, its backward, the update."""
        events, now = list[Event](), 0.0
        for (first, times), alike in groupby(self.phases, lambda one: (one.micro_batch, one.times)):
            merged: dict[Op, tuple[Lane, float]] = {}
            for phase in alike:
                lane, before = merged.get(phase.op, (phase.lane, 0.0))
                merged[phase.op] = lane, before + phase.seconds
            for micro_batch in range(first, first + times):
                for op, (lane, seconds) in merged.items():
                    events.append(Event(0, lane, op, 0, micro_batch, now, now + seconds))
                    now += seconds
        return Timeline(tuple(events), now)


def priced(held: StageHoldings, costs: Costs, nodes: NodeGroup) -> PricedStep:
    """A steady step of a model that is whole on every rank.

    The micro-batches between the first and the last are alike, so one of them is priced.
    """
    pricing = StagePricing(held, costs, nodes)
    last = held.graph.micro_batches - 1
    phases = [*pricing.micro_batch(0, last=last == 0)]
    if last > 1:
        phases += [replace(one, times=last - 1) for one in pricing.micro_batch(1, last=False)]
    if last:
        phases += pricing.micro_batch(last, last=True)
    return PricedStep((*phases, *pricing.update()))


class _Drive(NamedTuple):
    """Bytes/s of reading alone, of writing alone, and of both together."""

    read: PerRank
    write: PerRank
    both: PerRank


@dataclass(frozen=True, slots=True)
class StagePricing:
    """Seconds of what a rank of one stage does."""

    held: StageHoldings
    costs: Costs
    nodes: NodeGroup

    def micro_batch(self, number: int, *, last: bool) -> Iterator[Phase]:
        """Forward and backward."""
        forward, backward, again = self.compute()
        yield Phase(Op.FORWARD, number, Lane.COMPUTE, forward)
        yield from self._fetched(Op.FORWARD, number, forward)
        yield Phase(Op.BACKWARD, number, Lane.COMPUTE, backward + again, again=again)
        yield from self._fetched(Op.BACKWARD, number, backward + again)
        yield from self._gradients(number, last=last)

    def compute(self) -> tuple[float, float, float]:
        """Seconds of a micro-batch's forward, of its backward, and of recomputation within that."""
        graph = self.held.graph
        forward = backward = again = 0.0
        for name in self.held.layers:
            cost, kind = self.costs.kinds[name], graph.kinds[name]
            forward += cost.forward
            backward += cost.backward
            if self.held.decisions.recompute and kind.stores_activations:
                again += cost.again(Recompute.FULL)
        return forward, backward, again

    def _fetched(self, op: Op, number: int, compute: float) -> Iterator[Phase]:
        """ZeRO-3's parameters for a pass: moved from their tier, and gathered."""
        graph, decisions = self.held.graph, self.held.decisions
        if decisions.stage < 3:
            return
        gathers = sum(self.costs.kinds[name].gather for name in graph.layers)
        if gathers and graph.strategy.dp > 1:
            exposed = BEHAVIOUR.gather_exposed
            yield Phase(op, number, Lane.COMM, hidden_by(gathers, compute, exposed))
        nbytes = graph.sizes.parameter * self.held.owned
        if decisions.parameters is Tier.HOST:  # the next block comes while this one computes
            seconds = hidden_by(nbytes / self.costs.rates.h2d, compute, 0.0)
            yield Phase(op, number, Lane.H2D, seconds, nbytes)
        if decisions.parameters is Tier.NVME:  # nothing is fetched ahead
            yield Phase(op, number, Lane.NVME_READ, nbytes / self._drive.read, nbytes)
            yield Phase(op, number, Lane.H2D, nbytes / self.costs.rates.h2d, nbytes)

    @property
    def _drive(self) -> _Drive:
        """A rank's part of its node's drives."""
        nvme, part = self.nodes.nvme, self.costs.sharing.rate_of_rank
        assert nvme is not None
        both = nvme.node_both_ways or PerNode(inf)
        return _Drive(part(nvme.node_read), part(nvme.node_write), part(both))

    def _gradients(self, number: int, *, last: bool) -> Iterator[Phase]:
        """Gradients reduced over ranks, then moved to the tier of their sum."""
        graph, decisions, rates = self.held.graph, self.held.decisions, self.costs.rates
        if graph.strategy.dp > 1 and (decisions.stage >= 2 or last):
            exposed = BEHAVIOUR.reduce_exposed * (
                self.reduces() + (self._over_copies() if last else 0.0)
            )
            yield Phase(Op.BACKWARD, number, Lane.COMM, exposed)
        if decisions.state is Tier.GPU:
            return
        owned, down, up = self.held.owned, 0.0, 0.0
        if decisions.stage == 3:
            down = up = self.held.gradient * owned
        elif graph.micro_batches > 1:
            down = graph.sizes.parameter * owned
            up = down if number else 0.0
        if last:
            down += GRADIENT * self.held.away
        yield Phase(Op.BACKWARD, number, Lane.D2H, down / rates.d2h, down)
        yield Phase(Op.BACKWARD, number, Lane.H2D, up / rates.h2d, up)
        if last and decisions.state is Tier.NVME:
            nbytes = GRADIENT * owned
            yield Phase(Op.BACKWARD, number, Lane.NVME_WRITE, nbytes / self._drive.write, nbytes)

    def reduces(self) -> float:
        """Seconds to sum all gradients over data-parallel ranks."""
        if self.held.graph.strategy.dp == 1:
            return 0.0
        return sum(self.costs.kinds[name].reduce for name in self.held.layers)

    def _over_copies(self) -> float:
        """Seconds to sum a rank's part over groups with a copy of the state each (MiCS)."""
        return sum(self.costs.kinds[name].sum_replicas for name in self.held.layers)

    def sums(self) -> Iterator[Phase]:
        """A pipeline's gradients after its last backward: reduced, and moved to the CPU."""
        held, rates = self.held, self.costs.rates
        if held.graph.strategy.dp > 1:
            yield Phase(Op.REDUCE, 0, Lane.COMM, self.reduces())
        if held.decisions.state is not Tier.GPU:
            summed = held.graph.sizes.parameter if held.graph.micro_batches > 1 else 0
            nbytes = (summed + GRADIENT) * held.owned
            yield Phase(Op.GRAD_OUT, 0, Lane.D2H, nbytes / rates.d2h, nbytes)

    def update(self) -> Iterator[Phase]:
        """After the last backward."""
        decisions, rates, held = self.held.decisions, self.costs.rates, self.held
        cpu = held.away
        if held.resident:
            moved = held.resident * (UPDATE_BYTES + PASSES_BYTES)
            yield Phase(Op.UPDATE, 0, Lane.GPU_UPDATE, moved / rates.device_memory)
        if cpu:
            yield from self._on_cpu(cpu)
        if held.graph.strategy.dp > 1 and decisions.stage in (1, 2):
            gathers = sum(self.costs.kinds[name].gather for name in held.layers)
            yield Phase(Op.UPDATE, 0, Lane.COMM, gathers)

    def _on_cpu(self, elements: float) -> Iterator[Phase]:
        graph, decisions, rates = self.held.graph, self.held.decisions, self.costs.rates
        p, host = graph.sizes.parameter, self._host_bandwidth
        adam = self.costs.sharing.rate_of_rank(self.nodes.host.adam_rate) * ADAM_BYTES / ADAMW_BYTES
        passes = CLIPPED_BYTES * (self.held.training.clip_norm is not None)
        passes += (4 + p) * (decisions.stage < 3)
        seconds = max(elements / adam, ADAMW_BYTES * elements / host) + passes * elements / host
        if decisions.state is Tier.NVME:
            yield from self._swapped(elements, seconds)
        else:
            yield Phase(Op.UPDATE, 0, Lane.CPU, seconds)
        if decisions.parameters is Tier.GPU:
            yield Phase(Op.UPDATE, 0, Lane.H2D, p * elements / rates.h2d, p * elements)
        elif decisions.parameters is Tier.NVME:
            nbytes = p * elements
            yield Phase(Op.UPDATE, 0, Lane.NVME_WRITE, nbytes / self._drive.write, nbytes)

    def _swapped(self, elements: float, seconds: float) -> Iterator[Phase]:
        """Groups move beside the CPU's updates, so the slower of drive and CPU counts."""
        read, written = SWAPPED_BYTES * elements, (SWAPPED_BYTES - GRADIENT) * elements
        drive = self._drive
        moving = max(read / drive.read, written / drive.write, (read + written) / drive.both)
        waits = moving > seconds
        yield Phase(Op.UPDATE, 0, Lane.CPU, 0.0 if waits else seconds)
        yield Phase(Op.UPDATE, 0, Lane.NVME_READ, moving if waits else 0.0, read)
        yield Phase(Op.UPDATE, 0, Lane.NVME_WRITE, 0.0, written)

    @property
    def _host_bandwidth(self) -> PerRank:
        """Bytes/s of host memory to one rank; its buffers lie where its process started."""
        return min(self.costs.rates.host_memory, self.nodes.host.domain_bandwidth)
