"""Kernels of the gated delta rule against plain torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from bigplan.kernels import delta_rule as kernels
from bigplan.mechanics import rule_in_kernels
from bigplan.runtime.delta_rule import _InKernels, _Mixed
from bigplan.spec.mixers import GatedDeltaRule
from tests.kernels.generated import DEVICE, error, random, with_gradients

EPSILON = 1e-6
# Two value heads of a key head, keys wider than values, a last chunk that is not full.
RULE = GatedDeltaRule(key_heads=1, value_heads=2, key_dim=32, value_dim=16, taps=3)
QWEN = GatedDeltaRule(key_heads=2, value_heads=4)


def _inputs(rule: GatedDeltaRule, size: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    heads = (keys, keys, values, values, rule.value_heads, rule.value_heads)
    shapes: list[tuple[int, ...]] = [(*size, n) for n in heads]
    shapes += [(n, rule.taps) for n in (keys, keys, values)]
    shapes += [(rule.value_heads,), (rule.value_heads,), (rule.value_dim,)]
    return [random(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def _both(
    rule: GatedDeltaRule, size: tuple[int, int], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The result and all gradients: of the kernels, of plain torch, and exactly."""
    inputs = _inputs(rule, size, dtype)
    gradient = random(99, *inputs[3].shape, dtype=dtype)
    ours, plain = (
        with_gradients(lambda *x, how=how: how.apply(rule, EPSILON, *x), inputs, gradient)
        for how in (_InKernels, _Mixed)
    )
    exact = with_gradients(
        lambda *x: _Mixed.apply(rule, EPSILON, *x),  # type: ignore[no-untyped-call]
        [x.double() for x in inputs],
        gradient.double(),
    )
    return ours, plain, exact


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's products of fp32 are tf32")
@pytest.mark.parametrize(("dtype", "batch"), [(torch.float32, 2), (torch.float16, 1)], ids=str)
def test_kernels_err_as_plain_torch(dtype: torch.dtype, batch: int) -> None:
    """The interpreter has no products of bf16. Both round equally often; in fp16 plain torch does
    for its convolution and norm, kernels for the factors of products. Sums over all tokens cancel,
    so that their errors are a matter of luck up to fourfold.
    """
    for mine, theirs, right in zip(*_both(RULE, (batch, 70), dtype), strict=True):
        assert error(mine, right) < 4 * max(error(theirs, right), torch.finfo(dtype).eps)


@pytest.mark.skipif(DEVICE != "cpu", reason="one case is enough, in the interpreter")
def test_no_gradient_is_made_that_nobody_asks_for() -> None:
    inputs = _inputs(RULE, (1, 5), torch.float32)
    asked = tuple(i < 6 for i in range(len(inputs)))
    found = kernels.backward(RULE, EPSILON, inputs[3], asked, *inputs)
    assert [x is not None for x in found] == list(asked)


def test_what_kernels_do_not_take_is_plain_torch() -> None:
    assert rule_in_kernels(2, (128, 64), 4)
    for size, widths, taps in ((4, (128, 128), 4), (2, (128, 96), 4), (2, (128, 128), 9)):
        assert not rule_in_kernels(size, widths, taps)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [QWEN, RULE], ids=["128", "32 and 16"])
@pytest.mark.parametrize("length", [64, 1000])
def test_a_gpu_errs_as_plain_torch_in_bf16(rule: GatedDeltaRule, length: int) -> None:
    for mine, theirs, right in zip(*_both(rule, (2, length), torch.bfloat16), strict=True):
        assert error(mine, right) < 4 * max(error(theirs, right), 2**-8)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_again() -> None:
    first, second = (_both(QWEN, (1, 300), torch.bfloat16)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
