"""Activations of experts' rows by torch and by kernels: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.kernels.handwritten import weighted_rows
from bigplan.kernels.library import Library
from bigplan.kernels.optimised import Optimiser
from bigplan.runtime.generated import rows_of
from tests.kernels.generated import error, random

# A rounding of fp32 an operation, and an approximate exp; that of bf16 is 2^-9.
APART = {torch.float32: 3e-6, torch.bfloat16: 2**-8}
KINDS = (
    ("swiglu", "outputs"),
    ("swiglu", "inputs"),
    ("clamped_swiglu", "outputs"),
    ("geglu", "outputs"),
    ("relu2", "outputs"),
)


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(Optimiser("h200-sxm", 0.0).pricer)


def _plain(kind: str, weighs: str, gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """As transformers' experts have it."""
    each = weights[:, None]
    if weighs == "inputs":
        return F.silu(gate * each) * (up * each)
    if kind == "clamped_swiglu":
        # torch's clamp has a gradient at the limit itself up to 2.13, and none from 2.14 on.
        limited = torch.where(gate <= 7.0, gate, 7.0)
        within = torch.where(up.abs() <= 7.0, up, 7.0 * up.sign())
        return (within + 1.0) * limited * torch.sigmoid(1.702 * limited) * each
    if kind == "relu2":
        return F.relu(up).square() * each
    opened = F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")
    return opened * up * each


def _exact(kind: str, weighs: str, inputs: list[Tensor], given: Tensor) -> list[Tensor]:
    """The result, and gradients by up, weights and, where there is one, gate."""
    gate, up, weights = (one.double().requires_grad_() for one in inputs)
    result = _plain(kind, weighs, gate, up, weights)
    leaves = [up, weights] if kind == "relu2" else [up, weights, gate]
    return [result.detach(), *torch.autograd.grad(result, leaves, given.double())]


@pytest.mark.parametrize("dtype", list(APART), ids=str)
@pytest.mark.parametrize("size", [(2, 3), (5, 24), (33, 96), (3, 2050)])
@pytest.mark.parametrize(("kind", "weighs"), KINDS)
@pytest.mark.parametrize("by", ["torch", "kernel"])
def test_weighted_activations(
    dtype: torch.dtype, size: tuple[int, int], kind: str, weighs: str, by: str, library: Library
) -> None:
    """Gates beyond 7 and values beyond -7 and 7 are clamped, and have no gradient."""
    wide = 5.0 if kind == "clamped_swiglu" else 1.0
    gate, up, given = ((random(i, *size) * wide).to(dtype) for i in range(3))
    weights = random(4, size[0]).abs()
    exact = _exact(kind, weighs, [gate, up, weights], given)
    activation = rows_of(None if by == "torch" else library).activation(kind, weighs)
    own = None if kind == "relu2" else gate
    result = activation.forward(own, up, weights)
    gradient = given.clone()
    by_gate, by_up, by_weights = activation.backward(own, up, weights, gradient)
    assert by_weights.dtype is torch.float32
    found = [result, by_up, by_weights] if by_gate is None else [result, by_up, by_weights, by_gate]
    # Rounded after every operator of torch's; the weight is, too, before what is read has it.
    more = (8 if weighs == "inputs" else 4) if by == "torch" else 2
    # Over the gradient comes the result, which the gradient by the last matrix is made of.
    for one, right in zip([*found, gradient], [*exact, exact[0]], strict=True):
        assert error(one, right) < more * APART[dtype]


def test_no_rows_are_nothing() -> None:
    """An expert-parallel rank may get none."""
    none, weights = torch.empty(0, 24), torch.empty(0)
    assert weighted_rows.weighted(none, none, weights).shape == (0, 24)
    by_gate, by_up, by_weights = weighted_rows.weighted_backward(none, none, weights, none)
    assert by_gate is not None
    assert len(by_gate) == len(by_up) == len(by_weights) == 0
