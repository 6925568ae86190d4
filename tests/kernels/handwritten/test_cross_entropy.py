"""The loss by hand gives what plain torch gives in fp64: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigplan.kernels.handwritten import cross_entropy
from tests.examples import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# fp32 results carry a rounding (6e-8) an operation and an approximate exp or root (2e-7 on a GPU);
# sums over up to 300 terms keep their relative error far below this.
FP32 = 3e-6
runs = settings(max_examples=examples(15), derandomize=True, deadline=None)


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _close(ours: Tensor, expected: Tensor) -> None:
    error = (ours.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert not ours.isnan().any()
    assert float(error) < FP32


@given(st.integers(1, 9), st.integers(1, 5000), st.integers(0, 99))
@runs
def test_cross_entropy(rows: int, columns: int, seed: int) -> None:
    logits = _random(seed, rows, columns) * 5
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(-1, columns + 1, (rows,), generator=generator).to(DEVICE)
    gradient = _random(seed + 1, rows)
    wide = logits.double().requires_grad_()
    expected = cross_entropy.reference(wide, targets)
    losses, lse = cross_entropy.forward(logits, targets)
    assert torch.allclose(losses.double(), expected.detach(), rtol=FP32, atol=3e-6)
    assert torch.equal(losses[targets < 0], torch.zeros_like(losses[targets < 0]))
    (by_logits,) = torch.autograd.grad(expected, wide, gradient.double())
    ours = cross_entropy.backward_(logits, targets, lse, gradient)
    assert ours.data_ptr() == logits.data_ptr()
    assert float((ours.double() - by_logits).norm()) < FP32 * float(gradient.norm())
