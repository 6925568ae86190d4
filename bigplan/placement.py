"""Where every stored tensor of a stage lives and what is recomputed, by counts of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, NamedTuple, Self, TypeVar

from pydantic import Field, model_validator

from bigplan.graph.graph import LOSS_CHUNK_TOKENS, Graph, LayerKind, Recompute
from bigplan.mechanics import MOST_GRAPHS
from bigplan.spec.files.document import Spec
from bigplan.spec.layers import BLOCKS
from bigplan.spec.sharing import Scope

Picked = TypeVar("Picked")

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
    wait for numbers within a pass.
    """
    blocks = {name: kind for name, kind in placement.stages[0].kinds.items() if name in BLOCKS}
    waits = any(graph.kinds[name].waits or graph.kinds[name].ep > 1 for name in blocks)
    if not blocks or not graph.strategy.whole_passes or waits:
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


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Placement of one layer, from the counts of its stage; frozen ones have no gradients."""

    parameters: Tier
    gradients: Tier | None
    recompute: Recompute
    activations: Tier
    rows: Mapping[Share, float]  # fractions of what a rank owns of the layer

    @property
    def visits(self) -> bool:
        """Whether the parameters are on the GPU only while they are used."""
        return self.parameters is not Tier.GPU

    @property
    def looks_up(self) -> bool:
        """Whether tables and their gradients, if any, are in host memory."""
        return self.parameters is Tier.HOST and self.gradients in (None, Tier.HOST)


def layer_table(
    placement: KindPlacement, *, frugal_first: bool = False, whole_states: bool = False
) -> tuple[LayerPlacement, ...]:
    """Turn counts into a placement of each layer.

    One order of layers serves all tensors, and each prefix of it is spread evenly over the layers.
    So layers whose gradients stay on the GPU are among those whose parameters stay there, or the
    other way round. The GPU's share of the optimizer falls on layers with both on the GPU.

    Layers with gradients in host memory are the first to get activations in host memory. There,
    activations may lie in the memory of the gradients. Of these activations, the largest are
    assigned first. `frugal_first`: the first layers recompute the most, because with
    interleaved chunks they hold the most micro-batches. `whole_states`: a layer's state is on one
    tier, and what the GPU does not hold is streamed.
    """
    count = placement.layers
    order = spread_order(count)
    parameters = _assign({tier: placement.parameters.get(tier, 0) for tier in Tier}, order)
    gradients: list[Tier | None] = [None] * count
    if placement.gradients:
        gradients = [*_assign({tier: placement.gradients.get(tier, 0) for tier in Tier}, order)]
    kept = {
        (recompute, tier): placement.activations.get(recompute, {}).get(tier, 0)
        for tier in (Tier.HOST, Tier.GPU, Tier.NVME)
        for recompute in Recompute
    }
    if frugal_first:
        policies = _assign(dict(reversed(kept.items())), list(range(count)))
    else:
        backwards = order[::-1]  # the order's first layers, which the GPU updates, come last
        policies = _assign(kept, sorted(backwards, key=lambda i: gradients[i] is not Tier.HOST))
    if whole_states:
        rows = _whole_rows(placement, parameters, gradients, order)
    else:
        rows = _row_fractions(placement, parameters, gradients)
    return tuple(
        LayerPlacement(
            parameters=parameters[i],
            gradients=gradients[i],
            recompute=policies[i][0],
            activations=policies[i][1],
            rows=rows[i],
        )
        for i in range(count)
    )


def _assign(counts: Mapping[Picked, int], order: list[int]) -> list[Picked]:
    """The choice of every layer: the first layers of `order` take the first choice, and so on."""
    chosen = [choice for choice, number in counts.items() for _ in range(number)]
    by_layer = dict(zip(order, chosen, strict=True))
    return [by_layer[layer] for layer in range(len(order))]


def _row_fractions(
    placement: KindPlacement, parameters: list[Tier], gradients: Sequence[Tier | None]
) -> list[dict[Share, float]]:
    """The fraction of each share, for every layer; none for frozen layers.

    The GPU's share is spread over layers with parameters and gradients on the GPU, the other shares
    over what is left. Layers with parameters or gradients on NVMe have nothing streamed.
    """
    if not placement.gradients:
        return [{} for _ in parameters]
    homes = list(zip(parameters, gradients, strict=True))
    resident = sum(p is g is Tier.GPU for p, g in homes)
    wanted = placement.optimizer
    on_gpu = [
        min(1.0, wanted.get(Tier.GPU, 0.0) / resident) if p is g is Tier.GPU else 0.0
        for p, g in homes
    ]
    rest = [
        0.0 if Tier.NVME in home else 1.0 - gpu for home, gpu in zip(homes, on_gpu, strict=True)
    ]
    left = sum(rest)  # may be 0 even where the solver's rounding leaves `streamed` above 0
    streamed = min(1.0, placement.streamed / left) if left else 0.0
    host, nvme = wanted.get(Tier.HOST, 0.0) - placement.streamed, wanted.get(Tier.NVME, 0.0)
    by_cpu = host / (host + nvme) if nvme > 0 else 1.0
    return [
        _shares(gpu, streamed * part, max(0.0, by_cpu))
        for gpu, part in zip(on_gpu, rest, strict=True)
    ]


def _whole_rows(
    placement: KindPlacement,
    parameters: list[Tier],
    gradients: Sequence[Tier | None],
    order: Sequence[int],
) -> list[dict[Share, float]]:
    """The GPU has the state of so many layers whose parameters and gradients it has."""
    resident = [i for i in order if parameters[i] is gradients[i] is Tier.GPU]
    on_gpu = set(resident[: round(placement.optimizer.get(Tier.GPU, 0.0))])
    return [_shares(float(i in on_gpu), float(i not in on_gpu), 1.0) for i in range(len(order))]


def _shares(gpu: float, streamed: float, host: float) -> dict[Share, float]:
    """The fractions of all shares. `host`: of what the CPU updates, the part with state in host."""
    cpu = max(0.0, 1.0 - gpu - streamed)
    return {
        Share.GPU: gpu,
        Share.STREAMED: streamed,
        Share.HOST: cpu * host,
        Share.NVME: cpu * (1.0 - host),
    }


def spread_order(count: int) -> list[int]:
    """An order of 0 .. count-1 whose every prefix is spread evenly (bit reversal)."""
    bits = max(1, (count - 1).bit_length())
    reversed_all = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [i for i in reversed_all if i < count]


def pieces(kind: LayerKind, placement: LayerPlacement, ranks: int) -> dict[Share, range]:
    """For each share, its range of the elements that one of `ranks` owns of the flat layer.

    The ranges follow each other in the order of Share, and are cut at whole units.
    """
    owned, fractions = kind.owned(ranks), placement.rows
    if kind.frozen:
        return {share: range(0) for share in Share}
    last = next(share for share in reversed(Share) if fractions.get(share, 0.0) > 0.0)
    parts, start, reached = {}, 0, 0.0
    for share in Share:
        reached += fractions.get(share, 0.0)
        units = int(reached * owned / kind.unit + 1e-9)
        end = owned if share is last else max(start, units * kind.unit)
        parts[share] = range(start, min(end, owned))
        start = parts[share].stop
    return parts


def stage_table(graph: Graph, placement: Placement, stage: int) -> dict[int, LayerPlacement]:
    """Placement of every layer of a stage, by layer index."""
    chunked = graph.strategy.vpp > 1
    tables = {
        kind: iter(
            layer_table(
                rows,
                frugal_first=chunked,
                whole_states=bool(graph.kinds[kind].orthogonalised),
            )
        )
        for kind, rows in placement.stages[stage].kinds.items()
    }
    table = {layer: next(tables[graph.layers[layer]]) for layer in graph.stage_layers(stage)}
    if graph.sizes.state or graph.frozen:
        return table
    # An optimizer without state has no state to stream or to read from NVMe. So the CPU updates
    # all that the GPU does not update.
    gpu = {layer: at.rows[Share.GPU] for layer, at in table.items()}
    return {layer: replace(at, rows=_shares(gpu[layer], 0.0, 1.0)) for layer, at in table.items()}
