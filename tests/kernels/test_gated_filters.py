"""Kernels of the gated short convolution against plain torch, on a GPU or in the interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from bigplan.runtime.convolution import _in_kernels, convolved
from tests.kernels.generated import DEVICE, error, random, with_gradients

# A few roundings of fp32; in bf16 what is rounded once.
DTYPE, CLOSE = (torch.float32, 1e-6) if DEVICE == "cpu" else (torch.bfloat16, 2**-8)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("taps", [1, 3])
def test_the_kernels_are_the_convolution_with_its_gradients(taps: int, *, bias: bool) -> None:
    """Neither tokens nor channels fill whole programs."""
    shapes = [(2, 70, 72)] * 3 + [(72, taps)] + [(72,)] * bias
    inputs = [random(i, *shape, dtype=DTYPE) for i, shape in enumerate(shapes)]
    gradient = random(9, 2, 70, 72, dtype=DTYPE)

    def plain(*x: Tensor) -> Tensor:
        return convolved((x[0], x[1], x[2]), x[3], x[4] if bias else None)

    ours = with_gradients(_in_kernels, inputs, gradient)
    exact = with_gradients(plain, [x.double() for x in inputs], gradient.double())
    for mine, right in zip(ours, exact, strict=True):
        assert error(mine, right) < CLOSE
