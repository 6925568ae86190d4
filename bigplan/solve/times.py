"""Time rows: how long a step must take at least, for given decisions.

With U units per step and, per class of stages, F and B the times of one forward and one backward
pass of a unit and E the end of the first forward pass:

    F, B  >= compute;  >= (bytes_r - bytes already in slots when the pass starts) / rate_r
    H, A  >= backward of a unit's first micro-batch until it leaves, of its last from its arrival on
    P     >= F + B;  >= saves of activations, then fetches: rings are passed in program order
    E     >= F after the stages before it;  >= update, and every move it needs, then the last layer,
             where updates wait for the norm and so run in the next step's first forward;
             >= the first layer's + F
    step  >= E + (U - 1) P + B + backward of the stages before it
    step  >= E + (U - 1) P + what only starts in the last backward: reductions, gradients
             going home, updates that are not deferred
    step  >= E + gradients leaving, and added up by the CPU, all before deferred updates begin
    step  >= fill to the last stage and back + U B + (U - U_fill) F   (one-forward-one-backward)
    step  >= everything one lane does in a step

Passes follow each other on the GPU, so their times add. Before its pass a transfer can run only if
a slot is free, and the second row subtracts the bytes in slots. Every row is a true lower bound on
the simulated step; the simulator, not these rows, says how fast a plan is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bigplan.graph.graph import LayerKind
from bigplan.mechanics import STAGING
from bigplan.placement import Tier
from bigplan.solve.ends import leading_seconds, trailing_seconds
from bigplan.solve.linear import AtLeast, Linear, total, var
from bigplan.solve.memory import owned
from bigplan.solve.stage import AWAY
from bigplan.solve.stage_times import NOTHING, Kinds, StageTimes
from bigplan.solve.update_times import early_reads, gpu_seconds, late_seconds, update_seconds

BEFORE_FORWARD = ("cpu", "h2d", "read")  # lanes that do all of an update before its layer's forward


def pass_rows(times: StageTimes) -> Iterator[AtLeast]:
    """F and B of a class."""
    stage, rates, kinds = times.stage, times.costs.rates, list(times.stage.kinds)
    name, slots = stage.name, stage.most.slots
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
    loads, held = times.loads(times.again)
    yield AtLeast(backward, (1 / rates.h2d) * (loads + saves - held - passing))
    reads, held = times.weight_reads(times.again, staged=STAGING)
    yield AtLeast(backward, (1 / rates.nvme_read) * (reads + on_disk - held - waiting))
    for label, of in ((forward, kinds), (backward, times.again)):
        yield AtLeast(label, Linear(constant=_gathers(times, of)))


def pair_rows(times: StageTimes) -> Iterator[AtLeast]:
    """P of a class: a forward pass and the backward pass after it.

    Rings are passed in program order, so the first fetch waits for all saves but those in entries
    of rings. If there is one ring, these are its other entries. In the stage whose backward is of
    the same unit, the fetch also waits for its own data. There it waits for all saves but those of
    the unit's other micro-batches.
    """
    name, rates, stage = times.stage.name, times.costs.rates, times.stage
    pair, moved = f"{name}.P", times.moved
    yield AtLeast(pair, var(f"{name}.F") + var(f"{name}.B"))
    same_unit = stage.graph.in_flight_units(stage.stages[-1]) == 1
    slots, staged = stage.most.slots, STAGING
    if len(stage.graph.recomputes) == 1:
        others = times.group - 1 if same_unit else slots
        slots, staged = min(slots - 1, others), min(STAGING - 1, others)
    out = (1 / rates.d2h) * (moved - times.entries("passing", slots))
    yield AtLeast(pair, out + (1 / rates.h2d) * moved)
    on_disk = times.disk_saves
    written = on_disk - times.entries("on_disk", staged)
    yield AtLeast(pair, (1 / rates.nvme_write) * written + (1 / rates.nvme_read) * on_disk)


def hop_rows(times: StageTimes) -> Iterator[AtLeast]:
    """H and A of a class: what the stages before and after wait for.

    When the first micro-batch leaves, all layers but one have worked on the whole unit; the same
    holds from the arrival of the last. One micro-batch also passes all layers itself, which takes
    its part of the unit's backward.
    """
    stage, alone = times.stage, (1 / times.group) * times.backward_compute
    for label, end in (("H", 0), ("A", -1)):
        name = f"{stage.name}.{label}"
        others = times.other_micro_batches(stage.end_kinds[end])
        yield AtLeast(name, times.backward_compute - others)
        yield AtLeast(name, alone)


def _gathers(times: StageTimes, kinds: Kinds) -> float:
    """Seconds of ZeRO-3 gathers in a pass, less those that the slots may hold already."""
    stage = times.stage
    return sum(
        max(0, n - stage.ring(n)) * times.costs.kinds[k.name].gather
        for k, n in kinds
        if stage.sharded(k, 3) > 1
    )


def first_forward_rows(times: StageTimes, before: float) -> Iterator[AtLeast]:
    """E of a class: the stages before it, and deferred updates, come first."""
    name, rates = f"{times.stage.name}.E", times.costs.rates
    forward = var(f"{times.stage.name}.F")
    kinds, slots = list(times.stage.kinds), times.stage.most.slots
    loads, _ = times.loads(kinds)
    reads, _ = times.weight_reads(kinds)
    saved = times.saves - times.entries("passing", slots)
    written = times.disk_saves - times.entries("on_disk", slots + STAGING)
    moved = {
        "h2d": (1 / rates.h2d) * loads,
        "d2h": (1 / rates.d2h) * saved,
        "read": (1 / rates.nvme_read) * reads,
        "write": (1 / rates.nvme_write) * written,
    }
    yield AtLeast(name, before + forward)
    if leading := leading_seconds(times):
        yield AtLeast(name, Linear(constant=leading + times.forward_compute))
    if not times.stage.graph.deferred:
        yield AtLeast(name, (1 / rates.h2d) * loads)
        return
    yield AtLeast(name, Linear(constant=times.forward_compute) + gpu_seconds(times))
    yield from _first_layer_rows(times, name)
    for lane, seconds in update_seconds(times, kinds):
        # What leaves does so before the last layer, too, unless that saves activations itself.
        ends = lane in BEFORE_FORWARD or (lane == "d2h" and times.stage.last)
        after = times.last_forward if ends else 0.0
        yield AtLeast(name, seconds + moved.get(lane, NOTHING) + after - late_seconds(times, lane))


def _first_layer_rows(times: StageTimes, name: str) -> Iterator[AtLeast]:
    """No layer runs before its update; an embedding may take a sixth of the whole update.

    The first layer waits for its own update. The second also waits for its update by the CPU, which
    follows that of the first.
    """
    (kind, count), *others = times.stage.kinds
    if count > 1 or kind.frozen:
        return
    for lane, seconds in update_seconds(times, [(kind, count)]):
        if lane in BEFORE_FORWARD:
            yield AtLeast(name, times.forward_compute + seconds)
        if lane == "cpu" and others:
            rest = times.forward_compute - times.group * times.costs.kinds[kind.name].forward
            yield AtLeast(name, rest + seconds + _first_of(times, *others[0]))


def _first_of(times: StageTimes, kind: LayerKind, count: int) -> Linear:
    """Seconds of the CPU's update of the first of so many layers of a kind, at least.

    With g layers' state on the GPU the first layer has at most min(1, g) there. s layers' worth is
    streamed. It is spread over the other layers' rows, except those of the d layers with parameters
    or gradients on NVMe. So the first layer streams (1 - g) s / (n - g - d) <= (s + d) / n, because
    s <= n - g - d.
    """
    stage = times.stage
    on_disk = [stage.tensor(kind, tensor, Tier.NVME) for tensor in ("parameters", "gradients")]
    streamed = (1 / count) * (stage.streamed(kind) + total(on_disk))
    rows = Linear(constant=1.0) - stage.tensor(kind, "optimizer", Tier.GPU) - streamed
    return (owned(stage, kind) / times.costs.rates.cpu_update) * rows


def step_rows(times: StageTimes, fill: Linear, before: Linear) -> Iterator[AtLeast]:
    """The step, as seen by a class.

    `fill`: seconds until the class's first backward may start. `before`: backward seconds of the
    stages before the class, and what ends the step, which follow the class's last backward.
    """
    name, units, stage = times.stage.name, times.units, times.stage
    forward, backward = var(f"{name}.F"), var(f"{name}.B")
    in_fill = stage.graph.in_flight_units(stage.stages[-1])
    pairs = (units - in_fill) * var(f"{name}.P") + (in_fill - 1) * (forward + backward)
    last_backward = var(f"{name}.E") + pairs
    yield AtLeast("step", last_backward + backward + before)
    yield AtLeast("step", fill + units * backward + (units - in_fill) * forward + before)
    if trailing := trailing_seconds(times):
        yield AtLeast("step", last_backward + times.backward_compute + trailing)
    reduces = sum(n * times.final_reduce(k) for k, n in times.inner)
    yield AtLeast("step", last_backward + reduces)
    out = (1 / times.costs.rates.d2h) * times.gradients(AWAY, inner=True)
    yield AtLeast("step", last_backward + out)
    if not stage.graph.deferred:
        for lane, seconds in update_seconds(times, times.inner):
            early = early_reads(times) if lane == "read" else 0.0
            yield AtLeast("step", last_backward + seconds - early)
        return
    for seconds in _after_first_forward(times):
        yield AtLeast("step", var(f"{name}.E") + seconds)


def _after_first_forward(times: StageTimes) -> Iterator[Linear]:
    """Seconds of gradients leaving and being added up, where updates are deferred.

    Both begin with the first backward, and end before the next step's updates, which wait for the
    norm. Pipelines have no such row, because their gradients seldom leave: no plan changed by it.
    """
    rates, units, stage = times.costs.rates, times.units, times.stage
    away = times.gradients(AWAY)
    if stage.graph.strategy.pp == 1:
        yield (1 / rates.d2h) * (units * (away + times.row_gradients) + (units - 1) * times.moved)
        yield (3 * (units - 1) / rates.host_memory) * away


def lane_seconds(times: StageTimes) -> dict[str, Linear]:
    """Seconds each transfer lane and the CPU work in a step, as if slots held nothing from before.

    A switch counts a slot as full even if the slot stays empty. If the surcharge left out what
    slots hold, it would reward empty slots.
    """
    lanes = _passes_by_lane(times, held=False)
    for lane, seconds in update_seconds(times, list(times.stage.kinds), least=True):
        lanes[lane] = lanes.get(lane, NOTHING) + seconds
    return lanes


def lane_rows(times: StageTimes) -> Iterator[AtLeast]:
    """No step is shorter than what one lane does in it."""
    lanes = _passes_by_lane(times)
    for lane, seconds in update_seconds(times, list(times.stage.kinds)):
        yield AtLeast("step", lanes.get(lane, NOTHING) + seconds)
    yield AtLeast("step", lanes["comm"])


def _passes_by_lane(times: StageTimes, *, held: bool = True) -> dict[str, Linear]:
    """Seconds of a step's passes and gradients by lane; what slots have `held` is not moved."""
    stage, rates, units = times.stage, times.costs.rates, times.units
    kinds, on_disk = list(stage.kinds), times.disk_saves
    saves = times.moved if held else times.saves
    disk_gradients = times.gradients((Tier.NVME,))
    loads, reads = (
        _weights_in_step(times, which, held=held) for which in (times.loads, times.weight_reads)
    )
    reread = (units - 1) * disk_gradients
    return {
        "h2d": (1 / rates.h2d) * (loads + units * (saves + times.rows)),
        "d2h": (1 / rates.d2h) * (units * (saves + times.row_gradients + times.gradients(AWAY))),
        "cpu": (3 * (units - 1) / rates.host_memory) * times.gradients(AWAY),
        "read": (1 / rates.nvme_read) * (reads + units * on_disk + reread),
        "write": (1 / rates.nvme_write) * (units * (on_disk + disk_gradients)),
        "comm": _collectives(times, kinds),
    }


def _weights_in_step(
    times: StageTimes,
    of_pass: Callable[[Kinds], tuple[Linear, Linear]],
    *,
    held: bool,
) -> Linear:
    """Bytes to slots in a step; what these still have `held` is not moved again."""
    forward, in_slots = of_pass(list(times.stage.kinds))
    backward, inner_in_slots = of_pass(times.again)
    units = times.units
    moved = units * (forward + backward)
    return moved - (units - 1) * in_slots - units * inner_in_slots if held else moved


def _collectives(times: StageTimes, kinds: Kinds) -> Linear:
    """Reductions, and gathers under ZeRO."""
    stage, prices = times.stage, times.costs.kinds
    parts = []
    for k, n in kinds:
        often = times.units - 1
        reduce = times.reduce(k)
        away = stage.away(k, "gradients")
        if stage.sharded(k, 2) > 1:
            parts.append(Linear(constant=times.units * n * reduce))
        else:
            parts.append(often * reduce * away + n * reduce)
        if summed := times.sum_replicas(k):  # once, or in every unit if gradients leave
            parts.append(often * summed * away + n * summed)
        if stage.sharded(k, 1) > 1 and stage.sharded(k, 3) == 1 and not k.frozen:
            parts.append(Linear(constant=n * prices[k.name].gather))
    slots = _gathers(times, kinds) + _gathers(times, times.again)
    alone = stage.graph.strategy.shards == 1
    adapters = 0.0 if alone or not stage.adapters else times.costs.adapters.reduce
    return total(parts) + times.units * slots + adapters
