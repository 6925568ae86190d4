"""Where every stored tensor of a stage lives and what is recomputed, by counts of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self, TypeVar

from pydantic import Field, model_validator

from bigplan.graph.graph import LOSS_CHUNK_TOKENS, Graph, LayerKind, Recompute
from bigplan.spec.document import Spec

Choice = TypeVar("Choice")

SLOTS = 3  # GPU slots per streamed layer kind: one in use, one arriving, one to absorb jitter
SUMS = 2  # GPU sums per kind of layer whose gradients leave: one is added to, one leaves
CHUNK = 256 << 20  # bytes: large enough for full disk speed, small beside a layer's 2-6 GB of state


class Tier(StrEnum):
    """A level of memory, fastest first."""

    GPU = "gpu"
    HOST = "host"
    NVME = "nvme"


class KindPlacement(Spec):
    """The layers of one kind on one stage: how many keep what where.

    Everything counts layers; `optimizer` splits them into rows, so its counts need not be whole.
    """

    layers: int = Field(ge=1)
    parameters: Mapping[Tier, int]
    gradients: Mapping[Tier, int]
    activations: Mapping[Recompute, Mapping[Tier, int]]
    optimizer: Mapping[Tier, float]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        counts = {
            "parameters": sum(self.parameters.values()),
            "gradients": sum(self.gradients.values()),
            "activations": sum(sum(tiers.values()) for tiers in self.activations.values()),
        }
        for tensor, placed in counts.items():
            if placed != self.layers:
                raise ValueError(
                    f"{tensor} places {placed} of {self.layers} layers; place each once"
                )
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


class StagePlacement(Spec):
    """One pipeline stage."""

    kinds: Mapping[str, KindPlacement]


class Placement(Spec):
    """Every stage of a strategy, first to last."""

    stages: tuple[StagePlacement, ...]
    slots: int = Field(default=SLOTS, ge=1)
    sums: int = Field(default=SUMS, ge=1)
    shared_ends: bool = False  # the first and the last layer pass through the same slot and sum
    chunk: int = Field(default=CHUNK, ge=1)  # bytes of NVMe optimizer state updated at a time
    loss_chunk: int = Field(default=LOSS_CHUNK_TOKENS, ge=1)  # tokens the loss takes at a time


class Rings(NamedTuple):
    """How many layers' worth of GPU memory what passes through may take."""

    slots: int = SLOTS
    sums: int = SUMS
    shared_ends: bool = False

    @classmethod
    def of(cls, placement: Placement) -> Rings:
        """The placement's."""
        return cls(placement.slots, placement.sums, placement.shared_ends)


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """One layer's share of a stage's counts."""

    parameters: Tier
    gradients: Tier
    recompute: Recompute
    activations: Tier
    optimizer: Mapping[Tier, float]  # fractions of the layer's rows

    @property
    def streamed(self) -> bool:
        """Whether the parameters visit the GPU only while they are used."""
        return self.parameters is not Tier.GPU


def layer_table(
    placement: KindPlacement, *, frugal_first: bool = False
) -> tuple[LayerPlacement, ...]:
    """Counts to layers: every choice spread evenly, choices for the GPU nested in each other.

    One order of layers serves all tensors, so the layers whose gradients stay on the GPU are among
    those whose parameters do (or the other way round), and the GPU's share of the optimizer falls
    on layers that have both there. `frugal_first`: the first layers, which hold the most
    micro-batches of interleaved chunks, recompute the most.
    """
    count = placement.layers
    order = spread_order(count)
    parameters = _assign({tier: placement.parameters.get(tier, 0) for tier in Tier}, order)
    gradients = _assign({tier: placement.gradients.get(tier, 0) for tier in Tier}, order)
    kept = {
        (recompute, tier): placement.activations.get(recompute, {}).get(tier, 0)
        for recompute in Recompute
        for tier in Tier
    }
    if frugal_first:
        policies = _assign(dict(reversed(kept.items())), list(range(count)))
    else:
        policies = _assign(kept, order)
    resident = [p is g is Tier.GPU for p, g in zip(parameters, gradients, strict=True)]
    return tuple(
        LayerPlacement(
            parameters=parameters[i],
            gradients=gradients[i],
            recompute=policies[i][0],
            activations=policies[i][1],
            optimizer=_row_fractions(placement.optimizer, sum(resident), resident[i]),
        )
        for i in range(count)
    )


def _assign(counts: Mapping[Choice, int], order: list[int]) -> list[Choice]:
    """The first layers of `order` take the first choice, and so on."""
    chosen = [choice for choice, number in counts.items() for _ in range(number)]
    by_layer = dict(zip(order, chosen, strict=True))
    return [by_layer[layer] for layer in range(len(order))]


def _row_fractions(shares: Mapping[Tier, float], resident: int, on_gpu: bool) -> dict[Tier, float]:
    gpu = min(1.0, shares.get(Tier.GPU, 0.0) / resident) if on_gpu else 0.0
    host, nvme = shares.get(Tier.HOST, 0.0), shares.get(Tier.NVME, 0.0)
    rest = host + nvme
    host_part = (1.0 - gpu) * (host / rest if rest > 0 else 1.0)
    return {Tier.GPU: gpu, Tier.HOST: host_part, Tier.NVME: max(0.0, 1.0 - gpu - host_part)}


def spread_order(count: int) -> list[int]:
    """An order of 0 .. count-1 whose every prefix is spread evenly (bit reversal)."""
    bits = max(1, (count - 1).bit_length())
    reversed_all = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [i for i in reversed_all if i < count]


def split_rows(rows: int, fractions: Mapping[Tier, float]) -> dict[Tier, range]:
    """A tensor's rows by tier, whole rows, contiguous, GPU first. A single row is never split."""
    gpu = int(fractions.get(Tier.GPU, 0.0) * rows + 1e-9)
    host = int((fractions.get(Tier.GPU, 0.0) + fractions.get(Tier.HOST, 0.0)) * rows + 1e-9)
    if fractions.get(Tier.NVME, 0.0) <= 0.0:
        host = rows
        if fractions.get(Tier.HOST, 0.0) <= 0.0:
            gpu = rows
    return {Tier.GPU: range(gpu), Tier.HOST: range(gpu, host), Tier.NVME: range(host, rows)}


def piece_elements(kind: LayerKind, placement: LayerPlacement, tier: Tier) -> int:
    """Elements of the layer whose optimizer state is on `tier`."""
    return sum(
        len(split_rows(tensor.rows, placement.optimizer)[tier]) * tensor.columns
        for tensor in kind.tensors
    )


def stage_table(graph: Graph, placement: Placement, stage: int) -> dict[int, LayerPlacement]:
    """Placement of every layer of a stage, by layer index."""
    chunked = graph.strategy.vpp > 1
    tables = {
        kind: iter(layer_table(rows, frugal_first=chunked))
        for kind, rows in placement.stages[stage].kinds.items()
    }
    return {layer: next(tables[graph.layers[layer]]) for layer in graph.stage_layers(stage)}
