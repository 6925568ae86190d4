"""A native block and its loss to run again and again, and how long their passes take.

As the runtime runs them (runtime/layers/kinds.py): saved tensors packed, weights' gradients added
to fp32 sums in the products. h200_block.py and h200_clock.py set this beside the cost model.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bigplan.graph.graph import Recompute
from bigplan.profile.load import Load, tokens_of_round
from bigplan.runtime.layers import blocks
from bigplan.runtime.layers import kinds as layers
from bigplan.runtime.layers.kept import KeptActivations
from bigplan.runtime.layers.products import Products
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.weights.first_values import STD
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.model import ModelSpec

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# Model, sequences of a micro-batch, tokens of each.
MODEL, BATCH, LENGTH = ("llama-like-5.5b", 8, 4096) if CUDA else ("tiny-llama-demo", 2, 64)
HEATED = 8.0  # seconds at most until the clock settles
# Seconds of rounds before measuring, and measured.
WARM, MEASURED = (1.5, 1.0) if CUDA else (0.0, 0.05)

Passes = Mapping[str, Callable[[], object]]


class Layer:
    """Parameters in one flat bf16 buffer, as in a slot, and the fp32 sums of their gradients."""

    def __init__(self, model: ModelSpec, kind: str) -> None:
        shapes = {parameter.name: parameter.shape for parameter in model.kinds()[kind]}
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        flat = torch.empty(sum(sizes), dtype=torch.bfloat16, device=DEVICE)
        flat.normal_(0.0, STD)
        self.flat = flat.view(torch.uint8)
        sums = torch.zeros(sum(sizes), device=DEVICE)
        self.views, self.sums = (
            {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
            for parts in (torch.split(flat, sizes), torch.split(sums, sizes))
        )
        for view in self.views.values():
            if view.dim() == 1:
                view.fill_(1.0)

    def leaves(self) -> dict[str, Tensor]:
        """For autograd to differentiate by, but for matrices: products add those up."""
        return {
            name: view if view.dim() == 2 else view.detach().requires_grad_()
            for name, view in self.views.items()
        }


@dataclass(slots=True)
class Block:
    """FORWARD and BACKWARD of a block that keeps its activations."""

    block: layers.Block
    layer: Layer
    x: Tensor
    gradient: Tensor
    kept: KeptActivations = field(default_factory=KeptActivations)

    def forward(self) -> None:
        """Record the graph."""
        self.kept = KeptActivations(weights=self.layer.flat)
        self.block.record(self.layer.views, self.x, self.kept, Recompute.NONE)

    def backward(self) -> None:
        """Use it up."""
        self.kept.sums.open(self.layer.sums, fresh=False)
        _, gradients = self.kept.gradients(self.gradient)
        self.kept.sums.add(gradients)


@dataclass(slots=True)
class Head:
    """BACKWARD of the loss layer: all of its work, a chunk of tokens at a time."""

    model: ModelSpec
    layer: Layer
    x: Tensor
    targets: Tensor
    chunk: int

    def backward(self) -> None:
        """Loss and gradients of a micro-batch."""
        leaves, sums = self.layer.leaves(), Sums()
        sums.open(self.layer.sums, fresh=False)
        by_input = torch.empty_like(self.x)
        for start in range(0, len(self.x), self.chunk):
            part = slice(start, start + self.chunk)
            by_input[part] = self._piece(leaves, self.x[part], self.targets[part], sums)
        sums.close()

    def _piece(
        self, leaves: Mapping[str, Tensor], x: Tensor, targets: Tensor, sums: Sums
    ) -> Tensor:
        x = x.detach().requires_grad_()
        by = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        loss = blocks.head_loss(leaves, x, targets, self.model, Products(sums=sums).ways)
        scale = torch.full_like(loss, 1 / len(self.targets))
        by_x, *gradients = torch.autograd.grad(loss, [x, *by.values()], grad_outputs=scale)
        sums.add(dict(zip(by, gradients, strict=True)))
        return by_x


def wait() -> None:
    """Until the GPU is done."""
    if CUDA:
        torch.cuda.synchronize()


def run(passes: Passes, rounds: int, each: Callable[[str, int], Any] | None = None) -> None:
    """All passes in turn, so many rounds, each within the context that `each` makes of it."""
    for number in range(rounds):
        for name, work in passes.items():
            if each is None:
                work()
            else:
                with each(name, number):
                    work()


class Clocked:
    """A context that notes its beginning and end, on the GPU's clock where there is one."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *_: object) -> None:
        self._mark()

    def _mark(self) -> None:
        if CUDA:
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record()
            self.marks.append(mark)
        else:
            self.marks.append(time.perf_counter())

    @property
    def milliseconds(self) -> float:
        """Between the two, once the GPU is done."""
        start, stop = self.marks
        return float(start.elapsed_time(stop)) if CUDA else 1e3 * (stop - start)


def seconds_of(passes: Passes) -> float:
    """Of a round."""
    wait()
    start = time.perf_counter()
    run(passes, 2)
    wait()
    return (time.perf_counter() - start) / 2


def walls(passes: Passes, once: float) -> dict[str, float]:
    """Median milliseconds of each pass, gaps between kernels included."""
    found: dict[str, list[Clocked]] = defaultdict(list)

    def clocked(name: str, _: int) -> Clocked:
        found[name].append(Clocked())
        return found[name][-1]

    run(passes, round(WARM / once))
    run(passes, max(3, round(MEASURED / once)), clocked)
    wait()
    return {name: median(c.milliseconds for c in clocks) for name, clocks in found.items()}


def heat(nodes: NodeGroup) -> None:
    """Until the clock has settled; the rounds of every pass keep it there."""
    load = Load(DEVICE, torch.bfloat16, tokens_of_round(nodes.gpu.peak("bf16")))
    start = time.perf_counter()
    load.heat(HEATED, time.perf_counter)
    state = "settled" if load.settled else "its rate still changing"
    print(f"heated for {time.perf_counter() - start:.1f} s, {state}")
