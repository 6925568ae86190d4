"""What data-parallel ranks exchange at both ends of a step, where no compute hides it.

A layer's forward waits until its parameters are gathered, and the network gathers layers in order.
After a layer's last backward its gradients are reduced, behind those of the layers after it. So
with G, R seconds of a layer's gather and reduction, F, B of its passes on a unit:

    first forward  >= F of all layers + G of the layers up to j - F of the layers before j
    last backward  >= B of all layers + R of the layers up to j - B of the layers before j

for every layer j of a stage's first chunk. Whoever waits for the stage waits for this, too.

Of adapters all gradients are reduced after the very last backward, and all are updated at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bigplan.cost.costs import KindCost
from bigplan.graph.graph import LayerKind
from bigplan.solve.stage_times import StageTimes


def leading_seconds(times: StageTimes) -> float:
    """Seconds by which gathers hold up a stage's first forward at least."""
    graph, sharded = times.stage.graph, times.stage.sharded
    updated = 1 if graph.deferred and not graph.frozen else 3
    exposed = _exposed(
        # Into a slot, or after an update.
        (cost.gather * (sharded(kind, updated) > 1), times.group * cost.forward, count)
        for kind, cost, count in _opening(times)
    )
    return max(exposed, _adapters_updated(times) if graph.deferred else 0.0)


def trailing_seconds(times: StageTimes) -> float:
    """Seconds for which collectives go on at least after a stage's last backward.

    However it recomputes: a backward that takes longer hides no more than it could at the longest.
    """
    graph, sharded = times.stage.graph, times.stage.sharded
    if graph.frozen:
        return _adapters_summed(times) + (0.0 if graph.deferred else _adapters_updated(times))
    return _exposed(
        (
            times.final_reduce(kind)
            + cost.gather * (not graph.deferred and sharded(kind, 1) > 1 == sharded(kind, 3)),
            times.group * (cost.backward + max(map(cost.again, graph.recomputes))),
            count,
        )
        for kind, cost, count in _opening(times)
        if not times.stage.is_loss(kind)
    )


def last_reduction(times: StageTimes) -> float:
    """Seconds of the stage's very last reduction, which follows all of its compute and moves."""
    if times.stage.graph.frozen:
        return trailing_seconds(times)
    kind, *_ = next(_opening(times))
    return 0.0 if times.stage.is_loss(kind) else times.final_reduce(kind)


def _adapters_updated(times: StageTimes) -> float:
    """Seconds of the update of a stage's adapters."""
    elements = times.stage.adapters
    if not elements:
        return 0.0
    launching = times.costs.adapters.update_launch.seconds(elements)
    return max(elements / times.costs.rates.gpu_update, launching)


def _adapters_summed(times: StageTimes) -> float:
    """Seconds to sum the gradients of a stage's adapters over ranks, and of their norm.

    Less what follows the last of these gradients on the GPU's lane anyway.
    """
    graph, costs, elements = times.stage.graph, times.costs, times.stage.adapters
    if not elements:
        return 0.0
    reduced = costs.adapters.reduce if graph.strategy.shards > 1 else 0.0
    held = any(t.holders > 1 for kind, _ in times.stage.kinds for t in kind.adapters)
    shared = costs.adapters.tensor_reduce if held else 0.0
    squared = elements * graph.sizes.gradient / costs.rates.device_memory
    idle = sum(cost.backward * n for kind, cost, n in _opening(times) if kind.idle_backward)
    summed = shared + reduced + (squared if graph.deferred else 0.0)
    return max(0.0, summed - times.group * idle)


def _opening(times: StageTimes) -> Iterator[tuple[LayerKind, KindCost, int]]:
    """The layers of the first chunk in order, those alike together."""
    for name, count in times.stage.opening:
        yield times.stage.graph.kinds[name], times.costs.kinds[name], count


def _exposed(layers: Iterable[tuple[float, float, int]]) -> float:
    """Seconds of exchanges beyond compute that may hide them: of each layer, and how many of these.

    From one to the next of layers alike this grows or falls evenly: the first or the last has most.
    """
    exposed = exchanged = passed = 0.0
    for exchange, compute, count in layers:
        first, last = exchange - passed, count * exchange - (count - 1) * compute - passed
        exposed = max(exposed, exchanged + first, exchanged + last)
        exchanged += count * exchange
        passed += count * compute
    return exposed
