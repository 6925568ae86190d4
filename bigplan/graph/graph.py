"""The graph of one step for one strategy: layer kinds with their operators, tensors and bytes.

All sizes are those of one rank, after tensor parallelism. Nothing above this module knows what a
transformer is: a layer is a kind, a kind is tensors, operators and byte counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from bigplan.graph.strategy import Strategy


class Recompute(StrEnum):
    """What a layer does between its forward and its backward."""

    NONE = "none"  # keep everything that autograd saves
    FULL = "full"  # keep the layer's input, run the forward again


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter on one rank: `rows` rows of `columns` elements; a vector is one row."""

    name: str
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix product [m, k] x [k, n], `count` times."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention; `flops` counts the lower triangle only."""

    flops: float
    backward: bool = False


@dataclass(frozen=True, slots=True)
class Stream:
    """Memory-bound kernels that move `nbytes` through device memory."""

    nbytes: float
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """All-reduces of `nbytes` over the tensor-parallel group, `count` of them."""

    nbytes: int
    count: int = 1


Operator = Gemm | Attention | Stream | Collective


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One kind of layer on one rank. Byte counts are per micro-batch."""

    name: str
    tensors: tuple[Tensor, ...]
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    saved: int  # what autograd keeps for the backward without recomputation
    boundary: int  # the layer's input, which is what full recomputation keeps
    forward_workspace: int  # transient bytes during the forward, beyond what is saved
    backward_workspace: int  # transient bytes during the backward, beyond what is saved
    pinned: bool = False  # parameters and gradients must stay on the GPU (shared with a layer)
    stores_activations: bool = True  # False: nothing worth moving or recomputing is kept
    parameters: int = field(init=False)  # elements of all tensors; asked thousands of times

    def __post_init__(self) -> None:
        elements = sum(tensor.elements for tensor in self.tensors)
        object.__setattr__(self, "parameters", elements)

    def kept(self, recompute: Recompute) -> int:
        """Bytes kept between forward and backward of one micro-batch."""
        return self.saved if recompute is Recompute.NONE else self.boundary

    def workspace(self, recompute: Recompute) -> int:
        """Transient bytes of the worse of forward and backward."""
        again = self.saved if recompute is Recompute.FULL else 0
        return max(self.forward_workspace, self.backward_workspace + again)


@dataclass(frozen=True, slots=True)
class ElementSizes:
    """Bytes an element takes as parameter, gradient and optimizer state."""

    parameter: int
    gradient: int
    state: int
    master: bool  # the state holds an fp32 master copy, so an update needs no parameter


@dataclass(frozen=True, slots=True)
class Graph:
    """One optimizer step under one strategy, as the solver and the lowering see it."""

    strategy: Strategy
    layers: tuple[str, ...]  # the kind of every layer, first to last
    kinds: Mapping[str, LayerKind]
    sizes: ElementSizes
    micro_batches: int
    clipped: bool  # updates wait for the gradient norm, so they run in the next step's forward
    tied: bool = False  # the last layer reads the first layer's tensors

    @property
    def units(self) -> int:
        """Accumulation groups per step."""
        return self.micro_batches // self.strategy.accumulation_group

    def stage_layers(self, stage: int) -> range:
        """Layers of a pipeline stage: equal shares of the repeated layers, ends to the ends."""
        stages = self.strategy.pp
        if stages == 1:
            return range(len(self.layers))
        inner = (len(self.layers) - 2) // stages
        start = 0 if stage == 0 else 1 + stage * inner
        stop = len(self.layers) if stage == stages - 1 else 1 + (stage + 1) * inner
        return range(start, stop)

    def in_flight_units(self, stage: int) -> int:
        """Units whose activations a stage holds at once under one-forward-one-backward."""
        return min(self.units, self.strategy.pp - stage)
