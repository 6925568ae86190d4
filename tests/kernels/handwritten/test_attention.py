"""Attention of biased or capped scores is that of plain torch in fp64: on a GPU, or interpreted."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigplan.kernels.handwritten import attention as kernel
from bigplan.kernels.handwritten.attention import ScoreRule, Tile, Tiles
from bigplan.runtime.attention import alibi, capped
from bigplan.runtime.attention.in_blocks import Scores
from bigplan.runtime.layers.kept import KeptActivations
from tests.examples import examples
from tests.kernels.generated import DEVICE, error, random

# Tiles of either shape, so that sequences of tens of tokens have several: whole, cut, and empty.
WIDE = Tiles(Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1))
TALL = Tiles(Tile(16, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))
# Unit roundoff of products' inputs (fp32 as the interpreter has it), and what sums lose.
TOLERANCE = {torch.float16: 2.0**-10, torch.float32: 3e-6}


def _inputs(length: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, and the gradient by the result."""
    counts = heads, kv_heads, kv_heads, heads
    return [random(i, 2, length, n, width).to(dtype) for i, n in enumerate(counts)]


def bounds(length: int, *documents: list[int]) -> Tensor:
    """Of sequences of documents so long, int32 [sequences, 2, length]; a last one fills each up."""
    rows = []
    for lengths in documents:
        ends = [end for end in accumulate(lengths) if end < length] + [length]
        pairs = [(a, b) for a, b in pairwise([0, *ends]) for _ in range(a, b)]
        rows.append(torch.tensor(pairs, dtype=torch.int32).T)
    return torch.stack(rows).to(DEVICE)


@given(
    length=st.integers(1, 70),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (2, 1)]),
    width=st.sampled_from([16, 24]),
    window=st.none() | st.integers(1, 69),
    cap=st.sampled_from([None, 0.9]),
    biased=st.booleans(),
    documents=st.none() | st.lists(st.integers(1, 60), max_size=8),
    tiles=st.sampled_from([WIDE, TALL]),
)
@settings(max_examples=examples(30), derandomize=True, deadline=None)
def test_the_result_and_its_gradients(
    length: int,
    heads: tuple[int, int],
    width: int,
    window: int | None,
    cap: float | None,
    biased: bool,
    documents: list[int] | None,
    tiles: Tiles,
) -> None:
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    window = None if window is None or window >= length else window
    *inputs, gradient = _inputs(length, *heads, width, dtype)
    slopes = alibi.slopes(heads[0]).to(DEVICE) if biased else None
    narrow = None if slopes is None else slopes.float()
    rule = ScoreRule(width**-0.5, cap, window)
    wide = [each.double().requires_grad_() for each in inputs]
    apart = None if documents is None else bounds(length, documents, documents[::-1])
    expected = kernel.reference(wide[0], wide[1], wide[2], rule, slopes, apart)
    theirs = expected, *torch.autograd.grad(expected, wide, gradient.double())
    q, k, v = inputs
    results = kernel.forward((q, k, v), rule, narrow, tiles, apart)
    found = kernel.backward(gradient, (q, k, v), results, rule, narrow, tiles, apart)
    # Gradients by scores are differences of terms as large as the gradient. Of a token that sees
    # itself alone they cancel.
    least = gradient.double().norm() / 10
    for one, other in zip((results[0], *found), theirs, strict=True):
        assert not one.isnan().any()
        size = torch.maximum(other.detach().norm(), least)
        assert (one.double() - other.detach()).norm() < TOLERANCE[dtype] * size


def test_sums_are_of_scores_with_their_biases() -> None:
    """To base 2: another kernel, or a test, may build on them."""
    # A GPU rounds fp32 in products, fp16 not.
    q, k, v, _ = _inputs(40, 2, 2, 16, torch.float16 if DEVICE == "cuda" else torch.float32)
    slopes = alibi.slopes(2).to(DEVICE)
    _, sums = kernel.forward((q, k, v), ScoreRule(0.25), slopes.float(), WIDE)
    place = torch.arange(40, device=DEVICE)
    distance = place[None, :] - place[:, None]
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 4
    scores = scores + slopes[:, None, None] * distance
    expected = scores.masked_fill(distance > 0, -torch.inf).logsumexp(-1) / torch.log(
        torch.tensor(2.0)
    )
    assert error(sums, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [7, 200])
def test_the_runtime_takes_the_kernel_with_its_own_tiles(window: int | None) -> None:
    """And saves what wider heads save."""
    *inputs, gradient = _inputs(150, 2, 1, 16, torch.float16)
    biases = alibi.biases(2, 16, 150, DEVICE, torch.float16)
    found, saved = [], []
    for generated in (False, True):
        leaves, kept = [each.clone().requires_grad_() for each in inputs], KeptActivations()
        kept.weights = torch.empty(0, dtype=torch.uint8)
        kept.constants = frozenset(each.untyped_storage().data_ptr() for each in biases)
        with torch.autograd.graph.saved_tensors_hooks(kept._pack, kept._unpack):
            out = alibi.attention(
                leaves[0], leaves[1], leaves[2], biases, window, generated=generated
            )
        saved.append(sum(storage.nbytes for storage in kept._storages()))
        found.append((out.detach(), *torch.autograd.grad(out, leaves, gradient)))
    for ours, others in zip(found[1], found[0], strict=True):
        assert error(ours, others.double()) < 4 * TOLERANCE[torch.float16]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("window", [None, 7])
def test_capped_scores_of_the_widest_heads_are_those_of_plain_torch(window: int | None) -> None:
    *inputs, gradient = _inputs(40, 4, 2, 256, torch.float16)
    scores, found = Scores(0.1, 0.9, window), []
    for generated in (False, True):
        leaves = [each.clone().requires_grad_() for each in inputs]
        out = capped.attention(leaves[0], leaves[1], leaves[2], scores, generated=generated)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, gradient)))
    for ours, others in zip(found[1], found[0], strict=True):
        assert error(ours, others.double()) < 4 * TOLERANCE[torch.float16]


def test_wide_heads_and_fp32_are_not_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(kernel, "forward", refuse)
    for width, dtype in ((16, torch.float32), (136, torch.float16)):
        q, k, v, _ = _inputs(20, 2, 2, width, dtype)
        biases = alibi.biases(2, width, 20, DEVICE, dtype)
        alibi.attention(q, k, v, biases, generated=True)
    q, k, v, _ = _inputs(20, 2, 2, 128, torch.float16)
    with pytest.raises(AssertionError):
        alibi.attention(q, k, v, alibi.biases(2, 128, 20, DEVICE, torch.float16), generated=True)


def test_tiles_fit_the_gpu() -> None:
    """228 KiB of an H100, 164 of an A100, 100 of an RTX 4090, 64 of a T4."""
    shared = [228 << 10, 164 << 10, 100 << 10, 64 << 10]
    found = [kernel.tiles_for(128, each) for each in shared]
    assert found == [kernel.HOPPER[128], kernel.SMALL, kernel.SMALL, kernel.SMALLEST]
    assert kernel.tiles_for(32, 228 << 10) == kernel.HOPPER[64]
    assert kernel.tiles_for(256, 228 << 10) == kernel.HOPPER[256]
    assert kernel.tiles_for(256, 100 << 10) == kernel.SMALLEST
