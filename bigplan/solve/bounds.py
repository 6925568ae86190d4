"""A cheap lower bound of a strategy's step: arithmetic and the pipeline, no memory, no solver."""

from __future__ import annotations

from bigplan.cost import Costs
from bigplan.graph.graph import Graph
from bigplan.solve.stage import stage_classes
from bigplan.solve.times import StageTimes


def cheap_bound(graph: Graph, costs: Costs) -> float:
    """Seconds that every plan of the strategy takes at least, nothing recomputed or moved."""
    every = [StageTimes(stage, costs) for stage in stage_classes(graph)]
    bound = before = 0.0
    for times in every:
        stages = len(times.stage.stages)
        # The constants: every variable of these expressions is a recomputation.
        compute = times.forward_compute() + times.backward_compute().constant
        hop = times.forward_hop() + times.backward_tail().constant + 2 * costs.send
        before += (stages - 1) * hop
        bound = max(bound, before + graph.units * compute)
        before += hop
        if graph.strategy.dp > 1:
            reduces = sum(count * times.reduce(kind) for kind, count in times.stage.kinds)
            bound = max(bound, reduces)
    return bound

