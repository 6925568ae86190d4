"""Time rows: how long a step must take at least, for given decisions.

With U units per step and, per class of stages, F and B the times of one forward and one backward
pass of a unit and E the end of the first forward pass:

    F, B  >= compute;  >= (bytes_r - bytes already in slots when the pass starts) / rate_r
    P     >= F + B;  >= saves of activations, then fetches: rings are passed in program order
    E     >= F after the stages before it;  >= update, and every move it needs, where updates wait
             for the norm and so run in the next step's first forward
    step  >= E + (U - 1) P + B + backward of the stages before it
    step  >= E + (U - 1) P + what only starts in the last backward: reductions, gradients
             going home, updates that are not deferred
    step  >= fill to the last stage and back + U B + (U - U_fill) F   (one-forward-one-backward)
    step  >= everything one lane does in a step

Passes follow each other on the GPU, so their times add; a transfer for a pass can run before the
pass only into a free slot, which is what the second row subtracts. Every row is a true lower bound
on the simulated step; the simulator, not these rows, says how fast a plan is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from bigplan.cost import Costs
from bigplan.graph.graph import LayerKind
from bigplan.lower.layout import CHUNK_STAGING, STAGING
from bigplan.placement import CHUNK, Tier
from bigplan.solve.linear import AtLeast, Linear, total, var
from bigplan.solve.memory import chunk_bytes, gradient_bytes, owned, ring_bytes, weight_bytes
from bigplan.solve.stage import AWAY, RERUN, StageClass

NOTHING = Linear()


@dataclass(frozen=True)
class StageTimes:
    """A class of stages with its prices, as linear expressions in its decisions."""

    stage: StageClass
    costs: Costs

    @property
    def group(self) -> int:
        """Micro-batches per unit."""
        return self.stage.graph.strategy.accumulation_group

    @property
    def units(self) -> int:
        """Units per step."""
        return self.stage.graph.units

    @cached_property
    def inner(self) -> list[tuple[LayerKind, int]]:
        """Kinds whose backward is in the backward pass: all but the loss."""
        return [(k, n) for k, n in self.stage.kinds if not self.stage.is_loss(k)]

    def reduce(self, kind: LayerKind) -> float:
        """Seconds of reducing a layer's gradients."""
        alone = self.stage.graph.strategy.dp == 1
        return 0.0 if alone else self.costs.kinds[kind.name].reduce

    @cached_property
    def forward_compute(self) -> float:
        """Seconds of a unit's forward pass, the last layer's backward included."""
        prices = self.costs.kinds
        return self.group * sum(
            n * prices[k.name].forward + (prices[k.name].backward if self.stage.is_loss(k) else 0)
            for k, n in self.stage.kinds
        )

    def plain_backward(self) -> float:
        """Seconds of a unit's backward pass without recomputation."""
        prices = self.costs.kinds
        return self.group * sum(n * prices[k.name].backward for k, n in self.inner)

    @cached_property
    def backward_compute(self) -> Linear:
        """Seconds of a unit's backward pass, recomputation included."""
        prices = self.costs.kinds
        again = [
            prices[k.name].again(recompute) * self.stage.keeping(k, recompute)
            for k, _ in self.inner
            for recompute in RERUN
        ]
        return self.plain_backward() + self.group * total(again)

    def forward_hop(self) -> float:
        """Seconds until the unit's first micro-batch leaves the stage."""
        last = self.stage.counts[-1][0]
        return self.forward_compute - (self.group - 1) * self.costs.kinds[last].forward

    def backward_hop(self) -> Linear:
        """Seconds until the unit's first micro-batch leaves the stage backward."""
        return self.backward_compute - self.other_micro_batches(self.stage.counts[0][0])

    def backward_tail(self) -> Linear:
        """Seconds from the arrival of the unit's last micro-batch to the end of the pass."""
        return self.backward_compute - self.other_micro_batches(self.stage.counts[-1][0])

    def other_micro_batches(self, kind: str) -> float:
        """Seconds of a kind's backward on a unit's micro-batches but one, at most."""
        cost = self.costs.kinds[kind]
        again = max(cost.again(recompute) for recompute in self.stage.graph.recomputes)
        return (self.group - 1) * (cost.backward + again)

    # Bytes of one pass by lane, and the part of them that may be in slots when the pass starts.

    def loads(self, kinds: list[tuple[LayerKind, int]]) -> tuple[Linear, Linear]:
        """Parameters to the GPU."""
        moved = [(k, n, self.stage.away(k, "parameters"), "slots") for k, n in kinds]
        return self._moved(moved, 0)

    def weight_reads(
        self, kinds: list[tuple[LayerKind, int]], *, staged: int = 0
    ) -> tuple[Linear, Linear]:
        """Parameters from NVMe; with so many waiting in host staging before the pass starts."""
        on_disk = self.stage.tensor
        moved = [(k, n, on_disk(k, "parameters", Tier.NVME), "staged_weights") for k, n in kinds]
        return self._moved(moved, staged)

    def _moved(
        self, moved: list[tuple[LayerKind, int, Linear, str]], staged: int
    ) -> tuple[Linear, Linear]:
        """Bytes of all layers, and of those that slots and staging can hold at most."""
        every, held = [], []
        for kind, count, layers, switch in moved:
            nbytes = weight_bytes(self.stage, kind)
            ahead = self.stage.ring(count) + staged
            every.append(nbytes * layers)
            few = ahead >= count  # then they can hold every layer that moves
            held.append(nbytes * (layers if few else ahead * self.stage.switch(kind, switch)))
        return total(every), total(held)

    @cached_property
    def saves(self) -> Linear:
        """Activations off the GPU, or back."""
        return self._activations(AWAY)

    @cached_property
    def disk_saves(self) -> Linear:
        """Activations to NVMe, or back."""
        return self._activations((Tier.NVME,))

    def _activations(self, tiers: tuple[Tier, ...]) -> Linear:
        return total(
            [
                self.group * k.kept(recompute) * self.stage.policy(k, recompute, tier)
                for k, _ in self.inner
                for recompute in self.stage.graph.recomputes
                for tier in tiers
            ]
        )

    def entries(self, ring: str, count: int) -> Linear:
        """Bytes of `count` entries of every ring of activations."""
        return count * total([ring_bytes(self.stage, k, ring) for k, _ in self.inner])

    def gradients(self, tiers: tuple[Tier, ...], *, inner: bool = False) -> Linear:
        """Gradient bytes with their home on `tiers`."""
        kinds = self.inner if inner else list(self.stage.kinds)
        return total(
            [
                gradient_bytes(self.stage, k)
                * total([self.stage.tensor(k, "gradients", tier) for tier in tiers])
                for k, _ in kinds
            ]
        )

    # The update: what it takes on each lane, for all layers or all but the loss layer.

    def rows(self, tiers: tuple[Tier, ...], *, inner: bool = False) -> Linear:
        """Elements updated from state on `tiers`."""
        kinds = self.inner if inner else list(self.stage.kinds)
        return total(
            [
                owned(self.stage, k)
                * total([self.stage.tensor(k, "optimizer", tier) for tier in tiers])
                for k, _ in kinds
            ]
        )

    def update_seconds(self, *, inner: bool = False) -> Iterator[tuple[str, Linear]]:
        """Seconds of the update by lane."""
        sizes, rates, stage = self.stage.graph.sizes, self.costs.rates, self.stage
        kinds = self.inner if inner else list(stage.kinds)
        back, out = (
            total([size * owned(stage, k) * stage.cpu_rows_on_gpu(k, tensor) for k, _ in kinds])
            for tensor, size in (("parameters", sizes.parameter), ("gradients", sizes.gradient))
        )
        on_disk = total(
            [weight_bytes(stage, k) * stage.tensor(k, "parameters", Tier.NVME) for k, _ in kinds]
        )
        state = sizes.state * self.rows((Tier.NVME,), inner=inner)
        old_weights = NOTHING if sizes.master else back
        old_on_disk = NOTHING if sizes.master else on_disk
        gradients_on_disk = self.gradients((Tier.NVME,), inner=inner)
        yield "cpu", (1 / rates.cpu_update) * self.rows(AWAY, inner=inner)
        yield "h2d", (1 / rates.h2d) * back
        yield "d2h", (1 / rates.d2h) * (out + old_weights)
        yield "read", (1 / rates.nvme_read) * (state + gradients_on_disk + old_on_disk)
        yield "write", (1 / rates.nvme_write) * (state + on_disk)

    def early_reads(self) -> float:
        """Seconds of NVMe reads for the update that may run before there are gradients."""
        stage, sizes = self.stage, self.stage.graph.sizes
        state = max(owned(stage, k) * sizes.state for k, _ in stage.kinds)
        weights = 0 if sizes.master else sum(weight_bytes(stage, k) for k, _ in stage.kinds)
        ahead = CHUNK_STAGING * min(state, CHUNK + sizes.state) + STAGING * weights
        return ahead / self.costs.rates.nvme_read

    def late_writes(self) -> Linear:
        """Bytes that may still be on their way to NVMe after the last update: staging is full."""
        stage = self.stage
        weights = [
            weight_bytes(stage, k) * stage.switch(k, "staged_weights") for k, _ in stage.kinds
        ]
        return STAGING * total(weights) + float(CHUNK_STAGING * chunk_bytes(stage))

    def gpu_update(self) -> Linear:
        """Seconds of the update on the GPU."""
        return (1 / self.costs.rates.gpu_update) * self.rows((Tier.GPU,))


def pass_rows(times: StageTimes) -> Iterator[AtLeast]:
    """F and B of a class."""
    name, rates, kinds = times.stage.name, times.costs.rates, list(times.stage.kinds)
    slots = times.stage.most.slots
    forward, backward = f"{name}.F", f"{name}.B"
    yield AtLeast(forward, Linear(constant=times.forward_compute))
    yield AtLeast(backward, times.backward_compute)
    loads, held = times.loads(kinds)
    yield AtLeast(forward, (1 / rates.h2d) * (loads - held))
    reads, held = times.weight_reads(kinds, staged=STAGING)
    yield AtLeast(forward, (1 / rates.nvme_read) * (reads - held))
    saves, passing = times.saves, times.entries("passing", slots)
    yield AtLeast(forward, (1 / rates.d2h) * (saves - passing))
    on_disk = times.disk_saves
    waiting = times.entries("on_disk", slots + STAGING)
    yield AtLeast(forward, (1 / rates.nvme_write) * (on_disk - waiting))
    loads, held = times.loads(times.inner)
    yield AtLeast(backward, (1 / rates.h2d) * (loads + saves - held - passing))
    reads, held = times.weight_reads(times.inner, staged=STAGING)
    yield AtLeast(backward, (1 / rates.nvme_read) * (reads + on_disk - held - waiting))
    for label, of in ((forward, kinds), (backward, times.inner)):
        yield AtLeast(label, Linear(constant=_gathers(times, of, in_slots=True)))


def pair_rows(times: StageTimes) -> Iterator[AtLeast]:
    """P of a class: a forward pass and the backward pass after it.

    Rings are passed in program order, so the first fetch waits for all saves but those in entries
    of rings. Where there is one ring, that is its other entries; in the stage whose backward is of
    the same unit the fetch waits for its own data besides, and so for all but the saves of the
    unit's other micro-batches.
    """
    name, rates, stage = times.stage.name, times.costs.rates, times.stage
    pair, saves = f"{name}.P", times.saves
    yield AtLeast(pair, var(f"{name}.F") + var(f"{name}.B"))
    same_unit = stage.graph.in_flight_units(stage.stages[-1]) == 1
    slots, staged = stage.most.slots, STAGING
    if len(stage.graph.recomputes) == 1:
        others = times.group - 1 if same_unit else slots
        slots, staged = min(slots - 1, others), min(STAGING - 1, others)
    out = (1 / rates.d2h) * (saves - times.entries("passing", slots))
    yield AtLeast(pair, out + (1 / rates.h2d) * saves)
    on_disk = times.disk_saves
    written = on_disk - times.entries("on_disk", staged)
    yield AtLeast(pair, (1 / rates.nvme_write) * written + (1 / rates.nvme_read) * on_disk)


def _gathers(times: StageTimes, kinds: list[tuple[LayerKind, int]], *, in_slots: bool) -> float:
    """Seconds of ZeRO-3 gathers in a pass, less those that the slots may hold already."""
    stage = times.stage
    return sum(
        max(0, n - (stage.ring(n) if in_slots else 0)) * times.costs.kinds[k.name].gather
        for k, n in kinds
        if stage.sharded(k, 3) > 1
    )


def first_forward_rows(times: StageTimes, before: Linear) -> Iterator[AtLeast]:
    """E of a class: the stages before it, and deferred updates, come first."""
    name, rates = f"{times.stage.name}.E", times.costs.rates
    forward = var(f"{times.stage.name}.F")
    loads, _ = times.loads(list(times.stage.kinds))
    yield AtLeast(name, before + forward)
    if not times.stage.graph.deferred:
        yield AtLeast(name, (1 / rates.h2d) * loads)
        return
    yield AtLeast(name, Linear(constant=times.forward_compute) + times.gpu_update())
    for lane, seconds in times.update_seconds():
        if lane == "h2d":
            yield AtLeast(name, seconds + (1 / rates.h2d) * loads)
        elif lane == "write":
            yield AtLeast(name, seconds - (1 / rates.nvme_write) * times.late_writes())
        else:
            yield AtLeast(name, seconds)


def step_rows(times: StageTimes, fill: Linear, before: Linear) -> Iterator[AtLeast]:
    """The step, as seen by a class.

    `fill`: seconds until its first backward may start; `before`: backward seconds of the stages
    before it, which follow its last backward.
    """
    name, units, stage = times.stage.name, times.units, times.stage
    forward, backward = var(f"{name}.F"), var(f"{name}.B")
    in_fill = stage.graph.in_flight_units(stage.stages[-1])
    pairs = (units - in_fill) * var(f"{name}.P") + (in_fill - 1) * (forward + backward)
    last_backward = var(f"{name}.E") + pairs
    yield AtLeast("step", last_backward + backward + before)
    yield AtLeast("step", fill + units * backward + (units - in_fill) * forward + before)
    reduces = sum(n * times.reduce(k) for k, n in times.inner)
    yield AtLeast("step", last_backward + reduces)
    out = (1 / times.costs.rates.d2h) * times.gradients(AWAY, inner=True)
    yield AtLeast("step", last_backward + out)
    if not stage.graph.deferred:
        for lane, seconds in times.update_seconds(inner=True):
            early = times.early_reads() if lane == "read" else 0.0
            yield AtLeast("step", last_backward + seconds - early)


def lane_seconds(times: StageTimes) -> dict[str, Linear]:
    """Seconds each transfer lane and the CPU work in a step, at least."""
    stage, rates, units = times.stage, times.costs.rates, times.units
    kinds, update = list(stage.kinds), dict(times.update_seconds())
    saves, on_disk = times.saves, times.disk_saves
    disk_gradients = times.gradients((Tier.NVME,))
    adds = (3 * (units - 1) / rates.host_memory) * times.gradients(AWAY)
    loads, reads = (_weights_in_step(times, which) for which in (times.loads, times.weight_reads))
    reread = (units - 1) * disk_gradients
    return {
        "h2d": (1 / rates.h2d) * (loads + units * saves) + update["h2d"],
        "d2h": (1 / rates.d2h) * (units * (saves + times.gradients(AWAY))) + update["d2h"],
        "cpu": adds + update["cpu"],
        "read": (1 / rates.nvme_read) * (reads + units * on_disk + reread) + update["read"],
        "write": (1 / rates.nvme_write) * (units * (on_disk + disk_gradients)) + update["write"],
        "comm": _collectives(times, kinds),
    }


def _weights_in_step(
    times: StageTimes, of_pass: Callable[[list[tuple[LayerKind, int]]], tuple[Linear, Linear]]
) -> Linear:
    """Bytes of streamed parameters in a step: what slots still hold is not moved again."""
    forward, held = of_pass(list(times.stage.kinds))
    backward, held_inner = of_pass(times.inner)
    units = times.units
    return units * (forward + backward) - (units - 1) * held - units * held_inner


def _collectives(times: StageTimes, kinds: list[tuple[LayerKind, int]]) -> Linear:
    """Reductions, and gathers under ZeRO."""
    stage, prices = times.stage, times.costs.kinds
    parts = []
    for k, n in kinds:
        often = times.units - 1
        reduce = times.reduce(k)
        if stage.sharded(k, 2) > 1:
            parts.append(Linear(constant=times.units * n * reduce))
        else:
            away = stage.away(k, "gradients")
            parts.append(often * reduce * away + n * reduce)
        if stage.sharded(k, 1) > 1 and stage.sharded(k, 3) == 1:
            parts.append(Linear(constant=n * prices[k.name].gather))
    slots = _gathers(times, kinds, in_slots=True) + _gathers(times, times.inner, in_slots=True)
    return total(parts) + times.units * slots
