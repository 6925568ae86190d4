"""Rows and columns of one length: numbers of elements do not tell them apart, shapes do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigplan.kernels.here import runs_kernels
from bigplan.kernels.optimised import optimise
from tests.examples import examples
from tests.kernels.generated import DEVICE, error, every_operator_generated, random

FP32 = 1e-5  # sums of at most 512 terms in another order
N = 8

pytestmark = pytest.mark.skipif(not runs_kernels({DEVICE}), reason="needs Triton")

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum over columns": lambda x: x.sum(-1) * 2,
    "read along columns": lambda x: x + x.sum(-1) * 2,
    "read along rows": lambda x: x + x.sum(-1, keepdim=True) * 2,
    "expanded along columns": lambda x: x.sigmoid() + (x.sum(-1) * 2).expand(N, N),
    "expanded along rows": lambda x: x.sigmoid() + (x.sum(-1) * 2)[:, None].expand(N, N),
    "a column as rows": lambda x: x.sigmoid() * (x[:, 0] * 2).sigmoid()[:, None],
    "a maximum beside a softmax": lambda x: x.softmax(-1) + x.amax(-1),
    "a matrix for each of many": lambda x: x.sigmoid().expand(N, N, N) + x.tanh(),
}


def _same(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Results and gradients by generated kernels are torch's."""
    results = []
    with every_operator_generated():
        for way in (function, optimise(function)):
            result = way(*inputs)
            gradient = random(9, *result.shape)
            wanted = torch.autograd.grad(result, inputs, gradient, materialize_grads=True)
            results.append([result.detach(), *wanted])
    for expected, found in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert error(found, expected.double()) < FP32


@pytest.mark.parametrize("name", CASES)
def test_a_square(name: str) -> None:
    _same(CASES[name], random(1, N, N).requires_grad_())


def test_a_mask_for_as_many_rows_as_it_has_elements() -> None:
    """As in attention: 2 x 4 x 8 rows, and 8 x 8 elements of the mask."""

    def masked(scores: Tensor, x: Tensor) -> Tensor:
        return scores + torch.where(x > 0, x * 0.5, x * 2)

    _same(masked, random(1, 2, 4, 8, 8).requires_grad_(), random(2, 8, 8).requires_grad_())


OPERATIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a.tanh() * 2,
    lambda a, b: a.sum(-1),
    lambda a, b: a.sum(-1, keepdim=True) * 0.5,
    lambda a, b: a.sum(0),
    lambda a, b: a.unsqueeze(0),
    lambda a, b: a.unsqueeze(-1),
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: b - a.expand_as(b),
)
Step = tuple[int, int, int]  # an operation, and the places of two values before it


def _program(steps: list[Step], x: Tensor, y: Tensor) -> Tensor:
    """Operations that broadcast, reduce and reshape; those whose shapes do not go are left out."""
    values = [x, y, x.sigmoid()]
    for operation, first, second in steps:
        try:
            value = OPERATIONS[operation](*(values[i % len(values)] for i in (first, second)))
        except (RuntimeError, IndexError):
            continue
        if value.dim() < 4 and value.numel() <= N**3:
            values.append(value)
    means = [value.mean() * (i + 1) for i, value in enumerate(values[2:])]
    return torch.stack(means).sum() + values[-1].tanh()


@settings(max_examples=examples(25))
@given(
    st.lists(
        st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 9), st.integers(0, 9)),
        min_size=2,
        max_size=6,
    ),
    st.sampled_from([(N,), (N, N), (1, N), (N, 1), (2, 4, N), (N, N, N)]),
)
def test_any_program(steps: list[Step], shape: tuple[int, ...]) -> None:
    x, y = random(1, N, N).requires_grad_(), random(2, *shape).requires_grad_()
    _same(lambda x, y: _program(steps, x, y), x, y)
