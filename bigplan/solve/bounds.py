"""What a strategy's step takes, without a solver: lower bounds, and an estimate.

Bounds are arithmetic and the pipeline. The estimate knows the GPU's memory: a plan must save the
bytes that do not fit, and each way to save them takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf

from bigplan.cost import Costs
from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import Rings, Tier
from bigplan.solve.alike import ROOMY
from bigplan.solve.ends import leading_seconds, trailing_seconds
from bigplan.solve.interleaved import opening_seconds
from bigplan.solve.memory import (
    adapter_bytes,
    gradient_bytes,
    hidden_bytes,
    owned,
    weight_bytes,
    whole,
)
from bigplan.solve.stage import StageClass, stage_classes
from bigplan.solve.stage_times import StageTimes
from bigplan.solve.thresholds import EXPOSED

Way = tuple[float, float]  # bytes that it saves on the GPU at most, and seconds for each


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
        if graph.strategy.shards > 1:
            reduces = sum(count * times.reduce(kind) for kind, count in times.stage.kinds)
            bound = max(bound, reduces)
    return bound


def memory_estimate(graph: Graph, costs: Costs, least: Rings = ROOMY) -> float:
    """Seconds to expect, the cheapest ways taken to save memory; infinite only if nothing fits.

    `least`: the shortest rings that plans may have.
    """
    estimate = 0.0
    for times, before in _classes(graph, costs, least):
        missing = _everything(times.stage) - costs.capacity[Tier.GPU]
        moved, left, rerun = list(_moved(times)), list(_left(times)), list(_rerun(times))
        elsewhere = (costs.capacity[Tier.HOST] + costs.capacity[Tier.NVME]) / costs.sharing.ranks
        movable, kept, again = (sum(most for most, _ in ways) for ways in (moved, left, rerun))
        if missing > min(movable + max(kept, again), elsewhere + again):
            return inf
        seconds = before + graph.units * _compute(times)
        for most, price in sorted([*moved, *left, *rerun], key=lambda way: way[1]):
            seconds += price * max(0.0, min(most, missing))
            missing -= most
        estimate = max(estimate, seconds)
    return estimate


def _classes(graph: Graph, costs: Costs, least: Rings = ROOMY) -> list[tuple[StageTimes, float]]:
    """Every class, and the seconds before its last stage's first work and after its last."""
    before = 0.0
    found = list[tuple[StageTimes, float]]()
    for stage in stage_classes(graph, ROOMY, least):
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


def _everything(stage: StageClass) -> float:
    """Bytes with all tensors on the GPU, as little recomputed as may be."""
    kinds = list(stage.kinds)
    kept = sum(_kept(stage, kind) for kind, _ in kinds)
    workspace = max(kind.workspace(Recompute.NONE) for kind, _ in kinds)
    tensors = sum(_bytes(stage, k, n) for k, n in kinds) + adapter_bytes(stage)
    return tensors + kept + workspace + hidden_bytes(stage)


def _kept(stage: StageClass, kind: LayerKind) -> float:
    """Bytes of a kind's activations, as little recomputed as may be."""
    least = stage.graph.recomputes[0] if kind.stores_activations else Recompute.NONE
    return float(sum(stage.entries(kind)) * kind.kept(least))


def _bytes(stage: StageClass, kind: LayerKind, count: int) -> float:
    """Bytes of a kind's parameters, gradients and optimizer state, and of their rings."""
    sizes, shares = stage.graph.sizes, stage.shares(kind)
    nbytes = count * weight_bytes(stage, kind)
    slots = min(stage.least.slots, count) if stage.sharded(kind, 3) > 1 and not shares else 0
    if kind.frozen:
        return nbytes + whole(stage, kind) * slots * sizes.parameter
    nbytes += count * (gradient_bytes(stage, kind) + owned(stage, kind) * sizes.state)
    sums = min(stage.least.sums, count) if stage.sharded(kind, 2) > 1 and not shares else 0
    return nbytes + whole(stage, kind) * (slots * sizes.parameter + sums * sizes.gradient)


def _moved(times: StageTimes) -> Iterator[Way]:
    """Optimizer state, gradients and parameters that leave the GPU, exposed in part."""
    stage, rates, units = times.stage, times.costs.rates, times.units
    state = stage.graph.sizes.state
    # State that leaves is updated by the CPU, or passes through the GPU.
    passing = min(rates.state_in, rates.state_out)
    updated = rates.cpu_update * state + passing
    for kind, count in stage.kinds:
        if not kind.frozen:
            yield float(count * owned(stage, kind) * state), EXPOSED / updated
        if not (kind.frozen or stage.resident(kind, "gradients")):
            yield float(count * gradient_bytes(stage, kind)), EXPOSED * units / rates.d2h
        if not stage.resident(kind, "parameters"):
            passes = units if stage.is_loss(kind) else 2 * units
            yield float(count * weight_bytes(stage, kind)), EXPOSED * passes / rates.h2d


def _left(times: StageTimes) -> Iterator[Way]:
    """Activations that leave the GPU, exposed in part."""
    stage, rates = times.stage, times.costs.rates
    if stage.interleaved:
        return
    there_and_back = 1 / rates.d2h + 1 / rates.h2d
    for kind, _ in stage.kinds:
        if kind.stores_activations:
            passes = times.units * times.group / stage.held
            yield _kept(stage, kind), EXPOSED * passes * there_and_back


def _rerun(times: StageTimes) -> Iterator[Way]:
    """Activations that are recomputed, by steps from one policy to the next."""
    stage = times.stage
    for kind, _ in stage.kinds:
        if not kind.stores_activations:
            continue
        entries, prices = sum(stage.entries(kind)), times.costs.kinds[kind.name]
        for less, more in pairwise(stage.graph.recomputes):
            saved = kind.kept(less) - kind.kept(more)
            seconds = times.units * times.group * (prices.again(more) - prices.again(less))
            if saved > 0:
                yield float(entries * saved), max(0.0, seconds) / (stage.held * saved)
