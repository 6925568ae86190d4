"""Linear biases by wider heads and by the kernel, against scores with the biases added."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.runtime.attention import alibi

# Unit roundoffs of the format and of fp32, in which kernels add: of a result, relative to its norm.
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def test_slopes_are_those_of_the_paper() -> None:
    """Section 3: "for 8 heads ... 1/2, 1/4, ... 1/256", and for 16 their geometric means too."""
    assert alibi.slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi.slopes(16).tolist() == [2.0 ** (-i / 2) for i in range(1, 17)]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 40, 64, 71, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(alibi.slopes(heads).float(), theirs, rtol=1e-6)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_factors_multiply_to_slopes_and_places(dtype: torch.dtype) -> None:
    """As far as sequences of 65,793 tokens reach, the last of which has a third digit."""
    length, heads, width = 65_793, 12, 128
    by_place, by_head, slopes = alibi.biases(heads, width, length, "cpu", dtype)
    assert by_place.dtype == by_head.dtype == dtype
    assert by_place.isfinite().all()
    products = by_place.double() @ by_head.double().T / math.sqrt(width)
    expected = torch.arange(length)[:, None] * alibi.slopes(heads)
    assert torch.allclose(products, expected, rtol=2.0**-16, atol=0)
    assert torch.equal(slopes, alibi.slopes(heads).float())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_has_the_biases_of_its_heads(ranks: int) -> None:
    whole = alibi.biases(6, 16, 9, "cpu", torch.float32)
    parts = [whole.of_rank(rank, ranks) for rank in range(ranks)]
    for part in parts:
        assert torch.equal(part.by_place, whole.by_place)
    for together, one in zip(zip(*parts, strict=True), whole, strict=True):
        if one is not whole.by_place:
            assert torch.equal(torch.cat(together), one)


def _heads(heads: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(2, 50, heads, 16, device=device, dtype=dtype, requires_grad=True)


def _plain(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Scores with a bias each, in fp64."""
    length, heads, width = q.shape[1:]
    q, k, v = (each.double().transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))
    place = torch.arange(length)
    distance = (place[None, :] - place[:, None]).to(q.device)
    scores = q @ k.mT / math.sqrt(width) + alibi.slopes(heads).to(q)[:, None, None] * distance
    hidden = (distance > 0) | (distance <= -(window or length))
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2)


WAYS = [
    ("cpu", "wider heads"),
    pytest.param("cuda", "wider heads", marks=pytest.mark.gpu),
    pytest.param("cuda", "kernel", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "way"), WAYS)
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (4, 2)])
@pytest.mark.parametrize("window", [None, 11, 50])
def test_attention_and_its_gradients(
    window: int | None, heads: int, kv_heads: int, dtype: torch.dtype, device: str, way: str
) -> None:
    if dtype == torch.float32:  # the runtime repeats keys and values before
        kv_heads = heads
    q, k, v = inputs = [_heads(n, dtype, device) for n in (heads, kv_heads, kv_heads)]
    gradient = torch.randn(2, 50, heads, 16, device=device, dtype=dtype)
    biases = alibi.biases(heads, 16, 50, device, dtype)
    found = alibi.attention(q, k, v, biases, window, generated=way == "kernel")
    expected = _plain(q, k, v, window)
    ours = found, *torch.autograd.grad(found, inputs, gradient)
    theirs = expected, *torch.autograd.grad(expected, inputs, gradient.double())
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() < ROUNDING[dtype] * other.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("width", "window"), [(248, None), (256, None), (256, 11), (320, None)])
def test_heads_wider_than_flash_attention_takes(
    width: int, window: int | None, kv_heads: int, dtype: torch.dtype
) -> None:
    """Eight columns more than 248 are more than the 256 of FlashAttention-2."""
    q, k, v = inputs = [
        torch.randn(2, 50, n, width, device="cuda", dtype=dtype, requires_grad=True)
        for n in (4, kv_heads, kv_heads)
    ]
    found = alibi.attention(q, k, v, alibi.biases(4, width, 50, "cuda", dtype), window)
    expected = _plain(q, k, v, window)
    gradient = torch.randn_like(q)
    ours = found, *torch.autograd.grad(found, inputs, gradient)
    theirs = expected, *torch.autograd.grad(expected, inputs, gradient.double())
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other).norm() < ROUNDING[dtype] * other.norm()
