"""What data-parallel ranks exchange at both ends of a step, where no compute hides it.

A layer's forward waits until its parameters are gathered, and the network gathers layers in order.
After a layer's last backward its gradients are reduced, behind those of the layers after it. So
with G, R seconds of a layer's gather and reduction, F, B of its passes on a unit:

    first forward  >= F of all layers + G of the layers up to j - F of the layers before j
    last backward  >= B of all layers + R of the layers up to j - B of the layers before j

for every layer j of a stage's first chunk. Whoever waits for the stage waits for this, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.cost.price import KindCost
from bigplan.graph.graph import LayerKind
from bigplan.solve.stage_times import StageTimes


def leading_seconds(times: StageTimes) -> float:
    """Seconds by which gathers hold up a stage's first forward at least."""
    exposed = gathered = passed = 0.0
    for kind, cost, count in _opening(times):
        gather = cost.gather if _gathers_first(times, kind) else 0.0
        forward = times.group * cost.forward
        for _ in range(count):
            gathered += gather
            exposed = max(exposed, gathered - passed)
            passed += forward
    return exposed


def trailing_seconds(times: StageTimes) -> float:
    """Seconds for which collectives go on at least after a stage's last backward.

    However it recomputes: a backward that takes longer hides no more than it could at the longest.
    """
    graph, exposed, reduced, gathered, passed = times.stage.graph, 0.0, 0.0, 0.0, 0.0
    layers = [
        (times.reduce(kind), cost.gather if _gathers_last(times, kind) else 0.0, cost, count)
        for kind, cost, count in _opening(times)
        if not times.stage.is_loss(kind)
    ]
    every = sum(count * gather for _, gather, _, count in layers)
    for reduce, gather, cost, count in layers:
        backward = times.group * (cost.backward + max(map(cost.again, graph.recomputes)))
        for _ in range(count):
            reduced += reduce
            gathered += gather
            # In a pipeline all gathers come after all reductions.
            after = every if graph.strategy.pp > 1 else gathered
            exposed = max(exposed, reduced + after - passed)
            passed += backward
    return exposed


def last_reduction(times: StageTimes) -> float:
    """Seconds of the stage's very last reduction, which follows all of its compute and moves."""
    kind, _, _ = next(_opening(times))
    return 0.0 if times.stage.is_loss(kind) else times.reduce(kind)


def _opening(times: StageTimes) -> Iterator[tuple[LayerKind, KindCost, int]]:
    """Kinds of the first chunk in order, with the number of layers."""
    for name, count in times.stage.opening:
        yield times.stage.graph.kinds[name], times.costs.kinds[name], count


def _gathers_first(times: StageTimes, kind: LayerKind) -> bool:
    """Whether parameters are gathered for the first forward: into a slot, or after an update."""
    stage = times.stage
    updated = stage.graph.deferred and stage.sharded(kind, 1) > 1
    return updated or stage.sharded(kind, 3) > 1


def _gathers_last(times: StageTimes, kind: LayerKind) -> bool:
    """Whether parameters are gathered after an update at the end of the step."""
    stage = times.stage
    whole = stage.sharded(kind, 3) == 1
    return whole and not stage.graph.deferred and stage.sharded(kind, 1) > 1
