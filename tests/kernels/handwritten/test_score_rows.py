"""Attention of wide heads by products is that of plain torch in fp64: on a GPU, or interpreted."""

from __future__ import annotations

from unittest.mock import patch

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigplan.graph import wide_heads
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.kernels.handwritten import attention as fused_kernel
from bigplan.kernels.handwritten import score_rows
from bigplan.kernels.handwritten.attention import ScoreRule
from bigplan.runtime.attention import by_products, fused, isolated
from bigplan.runtime.attention.in_blocks import Scores
from bigplan.runtime.layers.kept import KeptActivations
from tests.examples import examples
from tests.kernels.generated import DEVICE, error, random
from tests.kernels.handwritten.test_attention import bounds
from tests.runtime.plans import tiny_model, tiny_training

# Unit roundoff of what products read (fp32 as the interpreter has it), and what sums lose.
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 3e-6}


def _inputs(length: int, heads: tuple[int, int], width: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, and the gradient by the result."""
    counts = heads[0], heads[1], heads[1], heads[0]
    return [random(i, 2, length, n, width).to(dtype) for i, n in enumerate(counts)]


def _check(inputs: list[Tensor], scores: Scores) -> None:
    """The result and its gradients are the reference's."""
    *heads, gradient = inputs
    wide = [each.double().requires_grad_() for each in heads]
    rule = ScoreRule(scores.scale, None, scores.window)
    expected = fused_kernel.reference(wide[0], wide[1], wide[2], rule, bounds=scores.bounds)
    theirs = expected, *torch.autograd.grad(expected, wide, gradient.double())
    leaves = [each.clone().requires_grad_() for each in heads]
    out = by_products.attention(leaves[0], leaves[1], leaves[2], scores)
    found = out.detach(), *torch.autograd.grad(out, leaves, gradient)
    # Of a token that sees itself alone gradients by scores cancel.
    least = gradient.double().norm() / 10
    for one, other in zip(found, theirs, strict=True):
        assert not one.isnan().any()
        size = torch.maximum(other.detach().norm(), least)
        assert (one.double() - other.detach()).norm() < TOLERANCE[gradient.dtype] * size


@given(
    length=st.integers(1, 20),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (2, 1)]),
    window=st.none() | st.integers(1, 24),
    documents=st.none() | st.lists(st.integers(1, 12), max_size=4),
    together=st.sampled_from([5, 16, 32]),
)
@settings(max_examples=examples(12), derandomize=True, deadline=None)
def test_the_result_and_its_gradients(
    length: int,
    heads: tuple[int, int],
    window: int | None,
    documents: list[int] | None,
    together: int,
) -> None:
    """Rows of one block of scores and of several, and of few queries and all."""
    dtype = torch.float16 if DEVICE == "cuda" else torch.float32
    apart = None if documents is None else bounds(length, documents, documents[::-1])
    few = patch.object(by_products, "wide_queries", lambda _: together)
    with few, patch.object(score_rows, "BLOCK", 8):
        _check(_inputs(length, heads, 24, dtype), Scores(0.3, None, window, None, apart))


@pytest.mark.parametrize("apart", [False, True])
def test_wide_heads_take_it_where_kernels_are_generated(apart: bool) -> None:
    """And save what others save; narrower heads, and plans without generated kernels, do not."""
    *inputs, gradient = _inputs(9, (2, 1), 264, torch.float16)
    documents = bounds(9, [4, 3], [9]) if apart else None
    found, saved = [], []
    for generated in (False, True):
        leaves, kept = [each.clone().requires_grad_() for each in inputs], KeptActivations()
        kept.weights, q, k, v = torch.empty(0, dtype=torch.uint8), *leaves
        hooks = torch.autograd.graph.saved_tensors_hooks(kept._pack, kept._unpack)
        taken = patch.object(by_products, "attention", wraps=by_products.attention)
        with hooks, taken as ours:
            if documents is None:
                out = fused.attention(q, k, v, scale=0.1, generated=generated)
            else:
                scores = Scores(0.1, bounds=documents)
                out = isolated.attention((q, k, v), scores, generated=generated)
        assert ours.called == generated
        if DEVICE == "cuda" or apart:  # a CPU's own kernel saves other sums
            saved.append(sum(storage.nbytes for storage in kept._storages()))
        found.append((out.detach(), *torch.autograd.grad(out, leaves, gradient)))
    assert len(set(saved)) <= 1
    for one, other in zip(found[1], found[0], strict=True):
        assert error(one, other.double()) < 4 * TOLERANCE[torch.float16]
    with patch.object(by_products, "attention") as narrow:
        q, k, v = (each[..., :256] for each in inputs)
        fused.attention(q, k, v, generated=True)
    assert not narrow.called


def test_its_operators_have_the_arithmetic_of_what_queries_see() -> None:
    model = tiny_model(heads=8, kv_heads=2, head_dim=512, max_sequence_length=8192)
    training = tiny_training(2, sequence_length=8192, precision="bf16")
    shape = RankShape(model, training, Strategy(dp=1, micro_batch=2))
    forward, backward = wide_heads.attention(shape, (8192, None), 1.0)
    half, whole = (wide_heads.attention(shape, (8192, None), part)[0] for part in (0.5, 1.0))
    # 8,192 tokens in blocks of 512: a query sees 4,096 keys on average and half a block more.
    once = 2.0 * 2 * 8192 * 8 * (4096 + 256) * 512
    assert [ops[0].flops for ops in (forward, backward)] == [2 * once, 5 * once]
    assert half[0].flops == whole[0].flops / 2
    assert half[1].nbytes == whole[1].nbytes / 2


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_a_gpu_errs_as_its_products_do(heads: tuple[int, int]) -> None:
    _check(_inputs(1500, heads, 512, torch.bfloat16), Scores(512**-0.5))


@pytest.mark.gpu
def test_a_backward_takes_what_is_counted() -> None:
    model = tiny_model(heads=32, kv_heads=4, head_dim=512, max_sequence_length=4096)
    training = tiny_training(2, sequence_length=4096, precision="bf16")
    shape = RankShape(model, training, Strategy(dp=1, micro_batch=2))
    q, k, v, gradient = _inputs(4096, (32, 4), 512, torch.bfloat16)
    scores = Scores(512**-0.5)
    _, sums = by_products.forward((q, k, v), scores)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    by_products.backward(gradient, (q, k, v), sums, scores)
    taken = torch.cuda.max_memory_allocated() - before
    # Gradients of the heads are made when scores are gone: none is at hand at the fullest.
    assert 0.97 * wide_heads.buffers(shape) < taken <= 1.01 * wide_heads.buffers(shape)
