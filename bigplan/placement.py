"""Where every stored tensor of a stage lives and what is recomputed, by counts of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, NamedTuple, Self, TypeVar

from pydantic import Field, model_validator

from bigplan.graph.graph import LOSS_CHUNK_TOKENS, Graph, Recompute
from bigplan.mechanics import MOST_GRAPHS
from bigplan.spec.carried import INPUTS
from bigplan.spec.files.document import Spec
from bigplan.spec.layers import BLOCKS, SHARING
from bigplan.spec.sharing import Scope

# GPU slots for each kind of layer whose parameters pass through: one in use, one arriving, one to
# absorb jitter.
SLOTS = 3
# GPU sums for each kind of layer whose gradients leave: one is added to while the other leaves.
SUMS = 2
CHUNK = 256 << 20  # bytes: large enough for full disk speed, small beside a layer's 2-6 GB of state


class Tier(StrEnum):
    """A level of memory, fastest first."""

    GPU = "gpu"
    HOST = "host"
    NVME = "nvme"

    @property
    def scope(self) -> Scope:
        """Whether the tier's capacity is counted per GPU or per node."""
        return "gpu" if self is Tier.GPU else "node"


class Share(StrEnum):
    """A part of a layer, by where its optimizer state lives and who updates it."""

    GPU = "gpu"
    STREAMED = "streamed"  # in host memory; state passes through the GPU, which updates it
    HOST = "host"  # in host memory, updated by the CPU
    NVME = "nvme"  # on NVMe; state passes through host memory, where the CPU updates it

    @property
    def tier(self) -> Tier:
        """The tier where the share's optimizer state lives."""
        return Tier.HOST if self is Share.STREAMED else Tier(self.value)

    @property
    def updater(self) -> Share:
        """One share for all shares with the same updater: HOST for those that the CPU updates."""
        return Share.HOST if self in ON_CPU else self


ON_CPU = (Share.HOST, Share.NVME)  # shares that the CPU updates
IN_CHUNKS = (Share.STREAMED, Share.NVME)  # shares whose state is updated away from its tier


Layers = Annotated[int, Field(ge=0)]


class KindPlacement(Spec):
    """For the layers of one kind on one stage: how many layers keep which tensor on which tier.

    All numbers count layers. Frozen layers have neither `gradients` nor `optimizer`, both empty.
    Optimizer state is split by rows of a layer, so the counts of
    `optimizer` and `streamed` need not be whole. `streamed` is the part of the state in host memory
    that the GPU updates.
    """

    layers: int = Field(ge=1)
    parameters: Mapping[Tier, Layers]
    gradients: Mapping[Tier, Layers] = {}
    activations: Mapping[Recompute, Mapping[Tier, Layers]]
    optimizer: Mapping[Tier, float] = {}
    streamed: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        counts = {
            "parameters": sum(self.parameters.values()),
            "gradients": sum(self.gradients.values()),
            "activations": sum(sum(tiers.values()) for tiers in self.activations.values()),
        }
        frozen = not self.gradients and not self.optimizer
        if frozen:
            del counts["gradients"]
        for tensor, placed in counts.items():
            if placed != self.layers:
                raise ValueError(
                    f"{tensor} places {placed} of {self.layers} layers; place each once"
                )
        if frozen:
            return self
        total = sum(self.optimizer.values())
        if abs(total - self.layers) > 1e-5 or min(self.optimizer.values()) < 0:
            raise ValueError(
                f"optimizer places {total:g} of {self.layers} layers; counts are >= 0 and add up"
            )
        on_gpu = min(self.parameters.get(Tier.GPU, 0), self.gradients.get(Tier.GPU, 0))
        if self.optimizer.get(Tier.GPU, 0.0) > on_gpu + 1e-5:
            raise ValueError(
                f"optimizer.gpu is {self.optimizer[Tier.GPU]:g} layers, but only {on_gpu} keep "
                "parameters and gradients on the GPU: the GPU updates only those"
            )
        return self

    @model_validator(mode="after")
    def _streamable(self) -> Self:
        on_host = self.optimizer.get(Tier.HOST, 0.0)
        if self.streamed > on_host + 1e-5:
            raise ValueError(
                f"streamed is {self.streamed:g} layers, but only {on_host:g} have their optimizer "
                "state in host memory"
            )
        on_gpu, on_disk = self.optimizer.get(Tier.GPU, 0.0), self.on_disk
        if self.streamed and self.streamed + on_gpu > self.layers - on_disk + 1e-5:
            raise ValueError(
                f"streamed and optimizer.gpu are {self.streamed + on_gpu:g} layers, but "
                f"{on_disk} of {self.layers} keep parameters or gradients on NVMe: only the CPU "
                "updates those"
            )
        return self

    @classmethod
    def on_gpu(cls, layers: int) -> Self:
        """So many layers with all their tensors on the GPU, and nothing recomputed."""
        here = {Tier.GPU: layers}
        return cls(
            layers=layers,
            parameters=here,
            gradients=here,
            activations={Recompute.NONE: here},
            optimizer={Tier.GPU: float(layers)},
        )

    @property
    def moves(self) -> bool:
        """Whether any tensor is not on the GPU."""
        placed = (self.parameters, self.gradients, self.optimizer, *self.activations.values())
        return any(count for part in placed for tier, count in part.items() if tier is not Tier.GPU)

    @property
    def on_disk(self) -> int:
        """Layers that keep parameters or gradients on NVMe."""
        return max(self.parameters.get(Tier.NVME, 0), self.gradients.get(Tier.NVME, 0))


class StagePlacement(Spec):
    """Placement of one pipeline stage, by kind of layer."""

    kinds: Mapping[str, KindPlacement]

    @property
    def blocks(self) -> KindPlacement:
        """Its blocks of all kinds together."""
        placed = [kind for name, kind in self.kinds.items() if name in BLOCKS]
        if len(placed) == 1:
            return placed[0]
        kept = [kind.activations for kind in placed]
        policies = dict.fromkeys(policy for activations in kept for policy in activations)
        return KindPlacement(
            layers=sum(kind.layers for kind in placed),
            parameters=_added(kind.parameters for kind in placed),
            gradients=_added(kind.gradients for kind in placed),
            activations={p: _added(one.get(p, {}) for one in kept) for p in policies},
            optimizer=_added(kind.optimizer for kind in placed),
            streamed=sum(kind.streamed for kind in placed),
        )


_Count = TypeVar("_Count", int, float)


def _added(counts: Iterable[Mapping[Tier, _Count]]) -> dict[Tier, _Count]:
    """Layers by tier, of several kinds together."""
    total: dict[Tier, _Count] = {}
    for each in counts:
        for tier, layers in each.items():
            total[tier] = total.get(tier, 0) + layers
    return total


class Placement(Spec):
    """Placement of every stage of a strategy, first to last, with the lengths of rings."""

    stages: tuple[StagePlacement, ...]
    slots: int = Field(default=SLOTS, ge=1)
    sums: int = Field(default=SUMS, ge=1)
    shared_ends: bool = False  # the first and the last layer pass through the same slot and sum
    chunk: int = Field(default=CHUNK, ge=1)  # bytes of NVMe optimizer state updated at a time
    loss_chunk: int = Field(default=LOSS_CHUNK_TOKENS, ge=1)  # tokens the loss takes at a time
    captured: bool = False  # the GPU repeats blocks' passes and updates from CUDA graphs


class Rings(NamedTuple):
    """The lengths of the rings of slots and sums through which layers pass on the GPU."""

    slots: int = SLOTS
    sums: int = SUMS
    shared_ends: bool = False

    @classmethod
    def of(cls, placement: Placement) -> Rings:
        """The rings of a placement."""
        return cls(placement.slots, placement.sums, placement.shared_ends)


def may_capture(graph: Graph, placement: Placement) -> bool:
    """Whether CUDA graphs can repeat the passes of all blocks.

    A CUDA graph uses the same addresses every time, and no other lane may read that memory. So all
    activations must stay on the GPU, and hidden states must go to no other rank. Nor may the host
    wait for numbers within a pass. What blocks hand on beside hidden
    states lies elsewhere in every step.
    """
    blocks = {name: kind for name, kind in placement.stages[0].kinds.items() if name in BLOCKS}
    waits = any(graph.kinds[name].waits or graph.kinds[name].ep > 1 for name in blocks)
    carried = INPUTS in graph.kinds or {*SHARING.values()} & {*blocks}
    if not blocks or not graph.strategy.whole_passes or waits or carried:
        return False
    tiers = {
        tier
        for kind in blocks.values()
        for kept in kind.activations.values()
        for tier, layers in kept.items()
        if layers
    }
    layers = sum(kind.layers for kind in blocks.values())
    return tiers <= {Tier.GPU} and graph.passes(layers) <= MOST_GRAPHS
