"""Heads of latent attention turned and joined: the kernels against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigplan.runtime.attention import latent
from bigplan.runtime.attention.latent import Angles
from tests.examples import examples
from tests.kernels.generated import random, with_gradients

runs = settings(max_examples=examples(20), derandomize=True, deadline=None)
# Batch, tokens, heads, and halves of the columns that rope turns: no power of two among them.
shapes = st.tuples(
    st.integers(1, 2), st.integers(1, 5), st.sampled_from((1, 3, 17)), st.sampled_from((1, 4, 6))
)
CLOSE = 1e-6  # in fp32: two products and a sum, in another order


def angles_of(length: int, half: int, *, interleaved: bool, by_kernel: bool) -> Angles:
    turns = random(7, length, half)
    return Angles(turns.cos(), turns.sin(), interleaved, by_kernel)


def both(length: int, half: int, *, interleaved: bool) -> list[Angles]:
    return [
        angles_of(length, half, interleaved=interleaved, by_kernel=by_kernel)
        for by_kernel in (True, False)
    ]


@given(shapes, st.booleans(), st.booleans(), st.integers(0, 9))
@runs
def test_queries_are_turned_in_place_and_back(
    shape: tuple[int, int, int, int], interleaved: bool, apart: bool, seed: int
) -> None:
    """Also where heads lie further apart than tokens, as gradients of attention's kernels do."""
    batch, length, heads, half = shape
    whole = random(seed, batch, length, heads, 2 * half + 5)
    given, back = whole.clone(), random(seed + 1, *whole.shape)
    if apart:
        back = back.transpose(1, 2).contiguous().transpose(1, 2)
    found = []
    for angles in both(length, half, interleaved=interleaved):

        def turned(q: Tensor, angles: Angles = angles) -> Tensor:
            return latent.turned(q * 1.0, angles)

        found.append(with_gradients(turned, [whole], back.clone()))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=CLOSE, atol=CLOSE)
    assert torch.equal(found[0][0][..., :5], given[..., :5])


@given(shapes, st.sampled_from((1, 5, 16)), st.booleans(), st.booleans(), st.integers(0, 9))
@runs
def test_keys_are_joined_and_their_gradients_parted(
    shape: tuple[int, int, int, int], width: int, interleaved: bool, apart: bool, seed: int
) -> None:
    batch, length, heads, half = shape
    plain, shared = random(seed, batch, length, heads, width), random(1, batch, length, 2 * half)
    back = random(2, batch, length, heads, width + 2 * half)
    if apart:
        back = back.transpose(1, 2).contiguous().transpose(1, 2)
    found = []
    for angles in both(length, half, interleaved=interleaved):

        def keys(plain: Tensor, shared: Tensor, angles: Angles = angles) -> Tensor:
            return latent.keys(plain, shared, angles)

        found.append(with_gradients(keys, [plain, shared], back))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=10 * CLOSE, atol=10 * CLOSE)


@pytest.mark.gpu
def test_a_gpu_rounds_once_in_16_bits() -> None:
    """At DeepSeek's widths."""
    angles = angles_of(300, 32, interleaved=True, by_kernel=True)
    narrow = angles._replace(cos=angles.cos.bfloat16(), sin=angles.sin.bfloat16())
    exact = Angles(narrow.cos.double(), narrow.sin.double(), interleaved=True)
    plain, shared = random(0, 2, 300, 128, 128).bfloat16(), random(1, 2, 300, 64).bfloat16()
    back = random(2, 2, 300, 128, 192).bfloat16()
    ours = with_gradients(lambda a, b: latent.keys(a, b, narrow), [plain, shared], back)
    wide = with_gradients(
        lambda a, b: latent.keys(a, b, exact), [plain.double(), shared.double()], back.double()
    )
    for mine, theirs in zip(ours, wide, strict=True):
        error = (mine.double() - theirs).abs()
        assert float((error / theirs.abs().clamp_min(1.0)).max()) < 2**-8
