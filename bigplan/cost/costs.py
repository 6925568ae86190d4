"""What a graph's layers and moves take on one rank, as `bigplan/cost/price.py` finds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

from bigplan.cost.host import UpdateLaunch
from bigplan.cost.rates import Rates
from bigplan.graph.graph import Graph, Recompute
from bigplan.placement import Tier
from bigplan.spec.sharing import NodeSharing


class GpuWaits(NamedTuple):
    """Seconds of a pass in which the GPU computes nothing."""

    collectives: float = 0.0  # tensor-parallel ones
    launching: float = 0.0  # until the host has launched the kernels


class Slowed(NamedTuple):
    """Seconds that passes of a micro-batch take longer by collectives beside them."""

    forward: float = 0.0
    backward: float = 0.0


class Taken(NamedTuple):
    """Seconds that compute loses beside one gather, and beside one reduction."""

    gather: float = 0.0
    reduction: float = 0.0

    def in_step(self, graph: Graph) -> Slowed:
        """What a micro-batch's passes lose of them in a step.

        ZeRO 3 gathers for every group of micro-batches and pass, ZeRO 1 and 2 once a step. ZeRO 2
        and 3 reduce for every group, others once a step.
        """
        zero, once = graph.strategy.zero, 1 / graph.micro_batches
        each = graph.units / graph.micro_batches
        forward, backward = {0: (0.0, 0.0), 3: (each, each)}.get(zero, (once, 0.0))
        reductions = each if zero >= 2 else once
        return Slowed(forward * self.gather, backward * self.gather + reductions * self.reduction)


NO_WAITS = GpuWaits()
NOTHING_TAKEN = Taken()
NOT_SLOWED = Slowed()
NO_LAUNCH = UpdateLaunch()


@dataclass(frozen=True, slots=True)
class KindCost:
    """Seconds of one layer of a kind: per micro-batch, and per reduction or gathering."""

    forward: float
    backward: float  # without recomputation
    reduce: float = 0.0
    gather: float = 0.0
    reruns: Mapping[Recompute, float] = field(default_factory=dict)
    forward_waits: GpuWaits = NO_WAITS  # included in the seconds above
    backward_waits: GpuWaits = NO_WAITS
    rerun_waits: Mapping[Recompute, GpuWaits] = field(default_factory=dict)
    taken: Taken = NOTHING_TAKEN  # by what its ranks exchange
    slowed: Slowed = NOT_SLOWED  # by these in a step; included in forward and backward
    tensor_reduce: float = 0.0  # gradients of parameters on several tensor-parallel ranks
    sum_replicas: float = 0.0  # a rank's part of the gradients over zero groups
    update_launch: UpdateLaunch = NO_LAUNCH  # the least that an update on the GPU takes
    orthogonalise: float = 0.0  # Muon's directions of a layer, with what ranks gather for them
    launched: KindCost | None = None  # without CUDA graphs, if the seconds above count on them

    def again(self, recompute: Recompute) -> float:
        """Seconds of the operators that run a second time before the backward."""
        return self.reruns.get(recompute, 0.0)

    def waits_again(self, recompute: Recompute) -> GpuWaits:
        """Waits of the operators that run a second time before the backward."""
        return self.rerun_waits.get(recompute, NO_WAITS)

    def exchanging(self, other: KindCost, graph: Graph | None = None) -> KindCost:
        """This computation with what another's ranks exchange, in another step if `graph` is."""
        launched = None if self.launched is None else self.launched.exchanging(other, graph)
        slowed = other.slowed if graph is None else other.taken.in_step(graph)
        return replace(
            self,
            forward=self.forward - self.slowed.forward + slowed.forward,
            backward=self.backward - self.slowed.backward + slowed.backward,
            reduce=other.reduce,
            gather=other.gather,
            sum_replicas=other.sum_replicas,
            taken=other.taken,
            slowed=slowed,
            orthogonalise=other.orthogonalise,
            launched=launched,
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Prices and capacities of one strategy on a cluster."""

    kinds: Mapping[str, KindCost]
    rates: Rates
    send: float  # seconds per micro-batch and pipeline hop
    capacity: Mapping[Tier, int]  # bytes in the tier's scope; a GPU that page-locks nothing
    sharing: NodeSharing
    reserve: int = 0  # bytes per GPU for torch's allocator, beside the capacity
    processes: int = 0  # bytes of host memory per node besides tensors
    page_tables: float = 0.0  # bytes of a GPU per byte of its rank in host memory
    # Seconds to lend the first stage's table to the last, and for its gradients to come back.
    table: tuple[float, float] = (0.0, 0.0)
    # What the adapters of the stage with the most of them exchange, and their update.
    adapters: KindCost = KindCost(0.0, 0.0)

    @property
    def captures(self) -> bool:
        """Whether the prices count on CUDA graphs."""
        return any(kind.launched for kind in self.kinds.values())

    def launched(self) -> Costs:
        """The same if Python launches every kernel."""
        kinds = {name: kind.launched or kind for name, kind in self.kinds.items()}
        return replace(self, kinds=kinds)

    def without_sharing(self) -> Costs:
        """The same if data-parallel ranks exchanged nothing."""
        kinds = {
            name: kind.exchanging(KindCost(0.0, 0.0, orthogonalise=kind.orthogonalise))
            for name, kind in self.kinds.items()
        }
        return replace(self, kinds=kinds)

    def beside(self, host: int) -> Mapping[Tier, int]:
        """The capacities where a rank has `host` bytes in host memory."""
        left = self.capacity[Tier.GPU] - ceil(self.page_tables * host)
        return {**self.capacity, Tier.GPU: left}
