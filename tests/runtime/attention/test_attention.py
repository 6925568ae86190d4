"""Attention within a window, against scores under a mask in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bigplan.runtime.attention.fused import attention, forward
from bigplan.runtime.attention.window import BLOCK
from tests.examples import examples

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Roundings of the results to their format, and of sums in fp32, relative to a tensor's norm. fp32
# on CUDA takes tensor cores of TF32 in no kernel here, unless asked to.
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
LENGTHS = [1, 2, 31, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77]


def dense(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The definition: token i sees tokens j of i - window < j <= i; in fp64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    places = torch.arange(q.shape[2], device=q.device)
    before = places[:, None] - places
    hidden = (before < 0) | (before >= window)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _heads(
    length: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, and a gradient."""
    generator = torch.Generator().manual_seed(length + heads)

    def make(n: int) -> Tensor:
        return torch.randn(2, length, n, width, generator=generator).to(device, dtype)

    inputs = [make(n).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    return inputs, make(heads)


def _check(inputs: list[Tensor], gradient: Tensor, window: int) -> None:
    q, k, v = inputs
    found, expected = attention(q, k, v, window), dense(q, k, v, window)
    ours = found, *torch.autograd.grad(found, inputs, gradient)
    theirs = expected, *torch.autograd.grad(expected, inputs, gradient.double())
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == q.dtype
        # Gradients by queries are differences of terms as large as `gradient`. A token that sees
        # itself alone has none at all.
        size = torch.maximum(other.detach().norm(), gradient.norm())
        assert (one.double() - other).norm() < ROUNDING[q.dtype] * size


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_window_hides_what_is_further_back(length: int, dtype: torch.dtype, device: str) -> None:
    """Windows of one token, of a few, around a block, around the sequence and beyond it."""
    inputs, gradient = _heads(length, 4, 2, 16, dtype, device)
    if dtype == torch.float32:  # the runtime repeats keys and values before
        inputs, gradient = _heads(length, 4, 4, 16, dtype, device)
    windows = {1, 3, BLOCK - 1, BLOCK, BLOCK + 5, length - 1, length, length + 1}
    for window in sorted(w for w in windows if w >= 1):
        _check(inputs, gradient, window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [12, 20, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_heads_of_any_width(dtype: torch.dtype, width: int, device: str) -> None:
    """Also of columns that the kernels of CUDA do not take, and one head of keys for all."""
    inputs, gradient = _heads(75, 3, 1, width, dtype, device)
    _check(inputs, gradient, 40)


@given(
    st.integers(1, 300), st.integers(1, 320), st.sampled_from((1, 2, 3)), st.sampled_from((1, 4))
)
@settings(max_examples=examples(60), derandomize=True, deadline=None)
def test_any_window_of_any_sequence(length: int, window: int, groups: int, kv_heads: int) -> None:
    inputs, gradient = _heads(length, groups * kv_heads, kv_heads, 8, torch.float32, "cpu")
    _check(inputs, gradient, window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_a_window_of_the_whole_sequence_is_none(dtype: torch.dtype, device: str) -> None:
    (q, k, v), _ = _heads(90, 4, 4, 16, dtype, device)
    assert torch.equal(attention(q, k, v, 90), attention(q, k, v))


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements of a tensor that an operator makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = found if isinstance(found, tuple) else (found,)
        self.most = max(self.most, *(x.numel() for x in made if isinstance(x, Tensor)), 0)
        return found


def test_no_mask_of_all_pairs_is_made() -> None:
    """4,096 tokens of one narrow head: a mask has 16.8 M elements, queries have 32,768."""
    length, window = 4096, 512
    inputs = [torch.randn(1, length, 1, 8).requires_grad_() for _ in range(3)]
    q, k, v = inputs
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        found = attention(q, k, v, window)
        torch.autograd.grad(found.sum(), inputs)
    assert largest.most <= max(BLOCK * (BLOCK + window), found.numel())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_saved_does_not_grow(dtype: torch.dtype) -> None:
    """Of its inputs, its result and a number a token and head, with a window and without."""
    (q, k, v), _ = _heads(200, 4, 4, 16, dtype, "cpu")
    heads = [x.detach().transpose(1, 2) for x in (q, k, v)]
    whole, narrow = (forward(heads, 0.25, window) for window in (None, 50))
    assert [x.shape for x in whole] == [x.shape for x in narrow]
    assert [x.dtype for x in whole] == [x.dtype for x in narrow]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_gradients_have_the_same_bits_where_asked_to(dtype: torch.dtype) -> None:
    (q, k, v), gradient = _heads(1500, 8, 8, 64, dtype, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            torch.autograd.grad(attention(q, k, v, 300), (q, k, v), gradient) for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
