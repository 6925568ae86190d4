"""Functions, blocks and references that tests of generated kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigplan.kernels.fusion import cover
from bigplan.kernels.fusion.price import Pricer
from bigplan.kernels.optimised import optimise

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def every_operator_generated() -> Iterator[None]:
    """Torch's own operators cost a second each, so that none is chosen where a kernel can be."""
    with patch.object(Pricer, "torch", lambda *_: 1.0), patch.object(cover, "WORTH", 0.0):
        yield


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def with_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor
) -> list[Tensor]:
    """The result and the gradients by all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient.to(result.dtype))]


def both_ways(function: Callable[..., Tensor], *inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Ours beside plain torch in fp64: the result and the gradient by each input."""
    wide = [x.double() for x in inputs]
    gradient = random(99, *function(*wide).shape)
    expected = with_gradients(function, wide, gradient.double())
    with every_operator_generated():
        ours = with_gradients(optimise(function), inputs, gradient)
    return list(zip(ours, expected, strict=True))


def error(ours: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    return float((ours.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions as Hugging Face writes them: x [b, heads, s, d], tables [s, d]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class RmsNorm(nn.Module):
    """As Hugging Face writes it: in fp32, cast back, then weighted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class LlamaBlock(nn.Module):
    """RMSNorms, rotary positions, grouped heads, SwiGLU."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2, inner: int = 48) -> None:
        super().__init__()
        self.sizes = heads * (width // heads), groups * (width // heads), groups * (width // heads)
        self.head = width // heads
        self.norm_1, self.norm_2 = RmsNorm(width), RmsNorm(width)
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, h = x.shape
        parts = self.qkv(self.norm_1(x)).split(self.sizes, -1)
        q, k, v = (part.view(b, s, -1, self.head).transpose(1, 2) for part in parts)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        normed = self.norm_2(x)
        result: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class ResidualBlock(nn.Module):
    """Convolutions with batch norm and ReLU, which change buffers."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(inner)) + x)


def tables(length: int, width: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(float(length)), torch.rand(width // 2)).to(DEVICE)
    return torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)
