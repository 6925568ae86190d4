"""Latent attention's own parts: narrow values, columns that rope turns, YaRN's angles."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigplan.runtime.attention import narrow_values
from bigplan.runtime.mixers.positions import rope_table
from bigplan.spec.rope_scaling import RopeScaling
from tests.runtime.plans import tiny_model

CLOSE = 1e-5


def by_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of [b, s, heads, columns], as its formula."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    hidden = torch.ones(q.shape[1], q.shape[1], device=q.device).triu(1).bool()
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhe->bihe", shares, v)


@given(st.integers(1, 2), st.integers(1, 70), st.sampled_from(((8, 8), (12, 8), (24, 5))))
@settings(max_examples=15, derandomize=True, deadline=None)
def test_narrow_values_are_mixed_as_the_formula_says(
    batch: int, length: int, widths: tuple[int, int]
) -> None:
    torch.manual_seed(length)
    width, values = widths
    shapes = [(batch, length, 3, columns) for columns in (width, width, values)]
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    (q, k, v), by_out = leaves, torch.randn(shapes[-1])
    found, exact = (
        (out.detach(), *torch.autograd.grad(out, leaves, by_out))
        for out in (narrow_values.attention(q, k, v, 0.3), by_softmax(q, k, v, 0.3))
    )
    for ours, theirs in zip(found, exact, strict=True):
        assert torch.allclose(ours, theirs, atol=CLOSE, rtol=CLOSE)


def test_nothing_padded_is_kept() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    q, k, v = (torch.randn(1, 16, 2, d, requires_grad=True) for d in (24, 24, 8))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = narrow_values.attention(q, k, v, 0.3)
    kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in saved}
    rows = 4 * 16 * 2
    assert sum(storage.nbytes() for storage in kept.values()) == rows * (24 + 24 + 8 + 8 + 1)
    assert out.is_contiguous()


def test_yarn_leaves_fast_turns_and_divides_slow_ones() -> None:
    """Frequency i turns L theta^(-2i/r) / (2 pi) times in the length L of the pre-training."""
    scaling = RopeScaling(name="yarn", factor=8.0, original_length=4096)
    model = tiny_model(head_dim=64, max_sequence_length=64, rope_scaling=scaling.model_dump())
    plain = rope_table(tiny_model(head_dim=64), 2, "cpu", torch.float64)
    ours = rope_table(model, 2, "cpu", torch.float64)
    factor = 0.1 * math.log(8.0) + 1.0
    assert scaling.angle_factor == pytest.approx(factor)
    angles, before = (torch.atan2(sin[1], cos[1]) for cos, sin in (ours, plain))
    turns = 4096 * before / (2 * math.pi)
    parts = before / angles
    assert parts[turns > 33].tolist() == pytest.approx([1.0] * int((turns > 33).sum()), rel=1e-5)
    slow = turns < 0.7
    assert slow.any()
    assert parts[slow].tolist() == pytest.approx([8.0] * int(slow.sum()), rel=1e-5)
    assert (parts.diff() >= -1e-5).all()
    assert torch.hypot(*ours)[1].tolist() == pytest.approx([factor] * 32, rel=1e-5)


def test_scores_are_scaled_as_deepseek_does() -> None:
    """With factor 40 and mscale_all_dim 1: (0.1 ln 40 + 1)^2 / root of 192, about 0.1352."""
    scaling = RopeScaling(
        name="yarn", factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0
    )
    assert scaling.angle_factor == 1.0
    widths = {"kv_rank": 8, "plain_dim": 128, "rope_dim": 64, "value_dim": 128}
    model = tiny_model(kv_heads=4, latent_attention=widths, rope_scaling=scaling.model_dump())
    assert model.scale_of_scores == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
