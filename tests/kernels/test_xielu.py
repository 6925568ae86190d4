"""xIELU, by torch's operators in parts and by kernels, is its formula and that's derivatives."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor
from torch.nn.functional import softplus

from bigplan.kernels.library import Library
from bigplan.kernels.optimised import Optimiser
from bigplan.runtime.constants import terms_of, values_of
from bigplan.runtime.layers import xielu as module
from bigplan.runtime.layers.xielu import xielu
from tests.kernels.generated import DEVICE, error, random

# fp32 sums of some hundred terms in another order; of bf16 Triton's interpreter cuts bits off.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


def _formula(x: Tensor, positive: Tensor, negative: Tensor, slope: Tensor, edge: Tensor) -> Tensor:
    below = torch.expm1(torch.minimum(x, edge)) - x
    curve = torch.where(x > 0, softplus(positive) * x * x, (slope + softplus(negative)) * below)
    return curve + slope * x


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("by", ["torch", "kernels"])
@pytest.mark.parametrize("edge", [-1e-6, -0.51])
def test_it_is_its_formula(
    dtype: torch.dtype, by: str, edge: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 100)  # four rows and less
    library = Library(Optimiser("h200-sxm", 0.0).pricer) if by == "kernels" else None
    x, given = (random(i, 2, 5, 24).to(dtype) for i in range(2))
    numbers = [torch.tensor([n], device=DEVICE).to(dtype) for n in (0.2, -1.1)]
    fixed = [terms_of(torch.tensor([n])).to(DEVICE, dtype) for n in (0.75, edge)]
    leaves = [one.requires_grad_() for one in (x, *numbers)]
    out = xielu(library, *leaves, *fixed)
    found = [out, *torch.autograd.grad(out, leaves, given)]
    exact = [one.detach().double().requires_grad_() for one in leaves]
    right = _formula(*exact, *(values_of(one).double() for one in fixed))
    expected = [right, *torch.autograd.grad(right, exact, given.double())]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert error(ours.detach(), theirs.detach()) < TOLERANCES[dtype]


def test_frozen_numbers_change_no_gradient_by_x() -> None:
    x = random(0, 3, 8).requires_grad_()
    fixed = [terms_of(torch.tensor([n])).to(DEVICE) for n in (0.5, -1e-6)]
    found = list[Tensor]()
    for trained in (True, False):
        numbers = [torch.zeros(1, device=DEVICE, requires_grad=trained) for _ in range(2)]
        found += torch.autograd.grad(xielu(None, x, *numbers, *fixed).sum(), x)
    assert torch.equal(*found)
