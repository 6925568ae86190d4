"""Where the seconds of a step go on the busiest GPU, in parts that add up to the step.

    compute       operators of forward and backward, run once
    recompute     operators of forward that run again before a backward
    collectives   collectives within layers (tensor and context parallelism) that the GPU waits for
    update        optimizer, gradient norm and sums on the GPU
    bubble        waiting for other pipeline stages: (pp - 1) / vpp units of a stage's work
    waiting       the rest: for transfers, for the network, for the CPU's update

The bubble is that of 1F1B (Narayanan et al., SC'21), but never more than the idle time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigplan.cost import Costs
from bigplan.graph.graph import Graph
from bigplan.placement import Placement, StagePlacement, Tier
from bigplan.plan import StepParts
from bigplan.program import Lane


@dataclass(frozen=True, slots=True)
class PlayedStep:
    """A simulated step: its seconds, and for each lane the busy seconds of the busiest stage."""

    seconds: float
    busy: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _PassSeconds:
    """Seconds of a stage's forwards and backwards in one step."""

    compute: float
    recompute: float
    collectives: float

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.collectives


def step_parts(graph: Graph, costs: Costs, placement: Placement, step: PlayedStep) -> StepParts:
    """The seconds of `step` by part, for the stage whose forwards and backwards take longest."""
    passes = max(
        (_passes(graph, costs, stage) for stage in placement.stages),
        key=lambda found: found.total,
    )
    on_gpu = max(step.busy.get(Lane.COMPUTE, 0.0), passes.total)
    idle = max(0.0, step.seconds - on_gpu)
    strategy = graph.strategy
    bubble = (strategy.pp - 1) / strategy.vpp * passes.total / graph.units
    others = {lane: seconds for lane, seconds in step.busy.items() if lane != Lane.COMPUTE}
    return StepParts(
        compute=passes.compute,
        recompute=passes.recompute,
        collectives=passes.collectives,
        update=on_gpu - passes.total,
        bubble=min(idle, bubble),
        waiting=idle - min(idle, bubble),
        waits_for=max(others, key=lambda lane: others[lane], default=""),
    )


def _passes(graph: Graph, costs: Costs, stage: StagePlacement) -> _PassSeconds:
    compute, recompute, waits = 0.0, 0.0, costs.adapters.tensor_reduce
    for name, kind in stage.kinds.items():
        cost, times = costs.kinds[name], kind.layers * graph.micro_batches
        collectives = cost.forward_waits.collectives + cost.backward_waits.collectives
        stay = kind.gradients.get(Tier.GPU, 0) if graph.strategy.zero < 2 else 0
        summed = stay + (kind.layers - stay) * graph.units
        waits += times * collectives + summed * cost.tensor_reduce
        compute += times * (cost.forward + cost.backward - collectives)
        for policy, tiers in kind.activations.items():
            recompute += graph.micro_batches * sum(tiers.values()) * cost.again(policy)
    return _PassSeconds(compute, recompute, waits)
