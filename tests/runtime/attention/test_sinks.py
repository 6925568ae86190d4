"""Attention with sinks, against scores and sinks in one softmax in fp64."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.runtime.attention import sinks
from bigplan.runtime.attention.window import BLOCK

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Of the results' formats, relative to a tensor's norm, as in test_attention.py.
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SCALE = 0.2


def dense(q: Tensor, k: Tensor, v: Tensor, logits: Tensor, window: int | None) -> Tensor:
    """The definition: the sink is a score beside those of keys, whose value is zero; in fp64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    places = torch.arange(q.shape[2], device=q.device)
    before = places[:, None] - places
    hidden = (before < 0) | (before >= (window or q.shape[2]))
    scores = (q @ k.mT * SCALE).masked_fill(hidden, -math.inf)
    every = logits.double()[:, None, None].expand(*scores.shape[:3], 1)
    shares = torch.cat((scores, every), -1).softmax(-1)[..., :-1]
    return (shares @ v).transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize(
    ("length", "width"),
    [*((length, 16) for length in (1, 31, BLOCK + 1, 2 * BLOCK + 77)), (BLOCK + 1, 64)],
)
@pytest.mark.parametrize("window", [None, 1, 16, BLOCK])
def test_a_sink_counts_in_the_sum_alone(
    length: int, width: int, window: int | None, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(length + width)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    kv_heads = 4 if dtype == torch.float32 else 2  # the runtime repeats these before
    heads = [make(2, length, n, width).requires_grad_() for n in (4, kv_heads, kv_heads)]
    # One that takes nothing, one that takes most, and two that take a part.
    logits = torch.tensor([-20.0, 4.0, 0.5, 1.5]).to(device, dtype).requires_grad_()
    gradient, inputs = make(2, length, 4, width), [*heads, logits]
    found = sinks.attention((heads[0], heads[1], heads[2]), logits, window, SCALE)
    expected = dense(heads[0], heads[1], heads[2], logits, window)
    ours = found, *torch.autograd.grad(found, inputs, gradient)
    theirs = expected, *torch.autograd.grad(expected, inputs, gradient.double())
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == dtype
        size = torch.maximum(other.detach().norm(), gradient.double().norm())
        assert (one.double() - other).norm() < ROUNDING[dtype] * size
    assert ours[4][1].abs() > 100 * ours[4][0].abs()
