"""How well a plan uses its GPUs, compared with the utilisation that nvidia-smi would show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bigplan.plan import Plan
from bigplan.program import Lane, resource
from bigplan.report.operators import OperatorRow
from bigplan.timeline import Timeline

# Lanes on which kernels run. NCCL's collectives and messages are kernels; copies are not.
KERNELS = (Lane.COMPUTE, Lane.GPU_UPDATE, Lane.COMM, Lane.SEND, Lane.RECV)

ON_GPU = (Lane.COMPUTE, Lane.GPU_UPDATE)


@dataclass(frozen=True)
class Efficiency:
    """How well a step uses the GPUs. All figures but `memory_bandwidth` are shares.

    `utilisation` is what nvidia-smi shows: the share of time in which at least one kernel runs.
    `mfu` and `hfu` are shares of the peak FLOP/s, without and with recomputation. `memory_share` is
    `memory_bandwidth` (bytes/s while kernels run) over the nominal bandwidth.
    `without_tensor_cores` and `narrow_loads` are shares of the time of products and attention: off
    tensor cores, and on them but slowed by rows whose lengths are no multiples of 8. `power_lost`
    is the share of that time that the GPU's power limit adds. `by_bound` splits the time of forward
    and backward.
    """

    utilisation: float
    mfu: float
    hfu: float
    memory_bandwidth: float
    memory_share: float
    without_tensor_cores: float
    narrow_loads: float
    power_lost: float
    by_bound: Mapping[str, float]


def efficiency_of(plan: Plan, timeline: Timeline, rows: Sequence[OperatorRow]) -> Efficiency:
    """Efficiency of the plan's step. For several pipeline stages, figures are averages."""
    gpu, step = plan.cluster.group.gpu, plan.predicted.step_seconds
    stages = plan.strategy.pp
    layers = [row for row in rows if row.of_layers]
    on_gpu = [row for row in rows if row.of_layers or row.where in ON_GPU]
    busy = sum(row.seconds for row in on_gpu) or 1.0
    products = [row for row in layers if row.tensor_cores is not None]
    whole = sum(row.seconds for row in products) or 1.0
    without = sum(row.seconds for row in products if not row.tensor_cores)
    narrow = sum(r.seconds for r in products if r.tensor_cores and (r.alignment or 1.0) < 1.0)
    bandwidth = sum(row.nbytes for row in on_gpu if row.bound != "communication") / busy
    return Efficiency(
        utilisation=_running(timeline, stages),
        mfu=plan.predicted.mfu,
        hfu=sum(row.flops for row in layers) / stages / step / gpu.peak(plan.training.precision),
        memory_bandwidth=bandwidth,
        memory_share=bandwidth / gpu.memory_bandwidth,
        without_tensor_cores=without / whole,
        narrow_loads=narrow / whole,
        power_lost=sum(row.seconds * (row.power_lost or 0.0) for row in products) / whole,
        by_bound=_by_bound(layers),
    )


def _by_bound(rows: Sequence[OperatorRow]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for row in rows:
        totals[row.bound] += row.seconds
    whole = sum(totals.values()) or 1.0
    return {name: s / whole for name, s in sorted(totals.items(), key=lambda item: -item[1])}


def _running(timeline: Timeline, stages: int) -> float:
    """The share of the step in which a kernel runs, averaged over the stages."""
    running = sum(
        covered(
            (event.start, event.end)
            for event in timeline.events
            if event.stage == stage and event.lane in KERNELS
        )
        for stage in range(stages)
    )
    return running / stages / timeline.seconds if timeline.seconds else 0.0


def resource_seconds(timeline: Timeline) -> dict[str, float]:
    """For each resource, the seconds in which it works, on the stage where it works most.

    While two copies take turns on a link, the times of both include the waiting. So the union of
    their times counts, not the sum.
    """
    spans: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for event in timeline.events:
        spans[event.stage, resource(Lane(event.lane))].append((event.start, event.end))
    worst: dict[str, float] = {}
    for (_, name), times in spans.items():
        worst[name] = max(worst.get(name, 0.0), covered(times))
    return worst


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of the intervals."""
    total, reached = 0.0, 0.0
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
