"""What `bigplan kernels bench` measures: functions over the shapes of many families.

Every third shape is set aside. The model's constants may be fitted only to the other shapes, and
results say which shapes are set aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shapes = tuple[tuple[int, ...], ...]
LARGE = 2**27  # elements of a tensor in bf16 at most: 256 MiB, which no L2 cache holds


@dataclass(frozen=True)
class Case:
    """A function and its inputs' shapes; all of them want gradients where it has a backward."""

    name: str
    function: Callable[..., Tensor]
    shapes: Shapes
    aside: bool  # no constant may be fitted to it
    kind: str  # what Liger and QuACK call it

    @property
    def label(self) -> str:
        """Name and largest shape."""
        return f"{self.name} {' x '.join(map(str, max(self.shapes, key=prod)))}"

    def inputs(self, device: str, dtype: torch.dtype) -> list[Tensor]:
        """Random, the same in every run."""
        generator = torch.Generator(device).manual_seed(0)
        return [
            torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()
            for shape in self.shapes
        ]


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """Over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), w, 1e-5)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Over the last dimension."""
    return F.layer_norm(x, (x.shape[-1],), w, b)


def added_rms_norm(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """RMSNorm of a sum that is read again, as a residual stream is."""
    total = x + y
    return rms_norm(total, w) + total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As in Llama's MLP."""
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """The same with a GELU."""
    return F.gelu(gate, approximate="tanh") * up


def gelu(x: Tensor) -> Tensor:
    """GPT-2's."""
    return F.gelu(x, approximate="tanh")


def biased_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU with a bias whose gradient is a sum over all rows."""
    return F.gelu(x + bias, approximate="tanh")


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [b, s, heads, d] by tables [s, 1, d]."""
    first, second = x.chunk(2, -1)
    return x * cos.detach() + torch.cat((-second, first), -1) * sin.detach()


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension."""
    return F.softmax(x, -1)


def norms(*, small: bool) -> Iterator[Case]:
    """RMSNorm, layer norm and add + norm of 64 to 16,384 columns."""
    widths = (64, 128, 256, 768, 1024, 1600, 2048, 3072, 4096, 5120, 8192, 16384)
    for index, columns in enumerate(widths[::4] if small else widths):
        rows = 64 if small else LARGE // columns
        shape, vector = (rows, columns), (columns,)
        aside = index % 3 == 2
        yield Case("rms norm", rms_norm, (shape, vector), aside, "rms_norm")
        if columns >= 768:
            yield Case("layer norm", layer_norm, (shape, vector, vector), aside, "layer_norm")
    for index, columns in enumerate((2048, 4096, 8192)[: 1 if small else 3]):
        rows = 64 if small else LARGE // columns
        shapes = ((rows, columns), (rows, columns), (columns,))
        yield Case("add + rms norm", added_rms_norm, shapes, index % 3 == 2, "fused_add_rms_norm")


def pointwise(*, small: bool) -> Iterator[Case]:
    """Gated and plain activations, rotary positions, softmax."""
    for index, columns in enumerate((5632, 11008, 14336, 28672)[: 1 if small else 4]):
        shape = (16 if small else LARGE // columns, columns)
        yield Case("swiglu", swiglu, (shape, shape), index % 3 == 2, "swiglu")
        yield Case("geglu", geglu, (shape, shape), index % 3 == 2, "geglu")
    for index, columns in enumerate((3072, 6400, 20480)[: 1 if small else 3]):
        shape = (16 if small else LARGE // columns, columns)
        yield Case("gelu", gelu, (shape,), index % 3 == 2, "")
        yield Case("bias + gelu", biased_gelu, (shape, (columns,)), index % 3 == 2, "")
    for index, head in enumerate((64, 96, 128)[: 1 if small else 3]):
        heads, length = 32, 16 if small else 4096
        batch = 1 if small else max(1, LARGE // (heads * length * head))
        shapes = ((batch, length, heads, head), (length, 1, head), (length, 1, head))
        yield Case("rotary", rotary, shapes, index % 3 == 2, "")
    for index, columns in enumerate((128, 1024, 4096, 32768)[: 1 if small else 4]):
        yield Case("softmax", softmax, ((64 if small else LARGE // columns, columns),),
                   index % 3 == 2, "")  # fmt: skip


class GptBlock(nn.Module):
    """A block of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] to the same."""
        b, s, h = x.shape
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return result


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm and ReLU around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, h, w] to the same, in the memory order of the weights."""
        inner = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(inner)) + x)


@dataclass(frozen=True)
class Workload:
    """A module that no kernel was written for by hand, and what it is called with."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    """of its first input"""
    further: Mapping[str, Any] = field(default_factory=dict)
    """by keyword: tensors, tuples of them, or others"""


def workloads(*, small: bool) -> Iterator[Workload]:
    """A block of GPT-2, and a residual block in both memory orders."""
    images, block = ((2, 4, 3, 3), (1, 4, 32)) if small else ((64, 256, 56, 56), (16, 1024, 1600))
    channels = images[1]
    yield Workload("gpt-2 block", GptBlock(block[-1], 4 if small else 25), block)
    yield Workload("residual block", ResidualBlock(channels), images)
    last = _channels_last(ResidualBlock(channels))
    yield Workload("residual block, channels last", last, images)


def _channels_last(module: nn.Module) -> nn.Module:
    """As tensor cores want it: channels of a position side by side."""
    kind: Any = {"memory_format": torch.channels_last}
    result: nn.Module = module.to(**kind)
    return result


def as_weights(x: Tensor, module: nn.Module) -> Tensor:
    """An input in the memory order of a module's convolutions, if it has some."""
    images = [p for p in module.parameters() if p.dim() == 4]
    last = images and images[0].is_contiguous(memory_format=torch.channels_last)
    return x.contiguous(memory_format=torch.channels_last) if last else x
