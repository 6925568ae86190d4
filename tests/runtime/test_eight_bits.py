"""Products in 8 bits: what is lost, on every device, and that runs with them train."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigplan.mechanics import LEAST_LARGEST
from bigplan.runtime.eight_bits import GRADIENTS, VALUES, EightBits, cast
from bigplan.runtime.products import Products, Sums
from tests.examples import examples

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
runs = settings(max_examples=examples(20), derandomize=True, deadline=None)
# Half of a unit in the last place: E4M3 has three bits of mantissa, E5M2 two.
LOST = {VALUES: 2**-4, GRADIENTS: 2**-3}


def _random(seed: int, *shape: int, device: str = "cpu") -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device, torch.bfloat16)


@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS], ids=["e4m3", "e5m2"])
@given(st.integers(0, 9), st.sampled_from([1e-20, 1e-3, 1.0, 1e5]))
@runs
def test_a_cast_loses_no_more_than_its_mantissa_lacks(
    dtype: torch.dtype, seed: int, size: float
) -> None:
    x = _random(seed, 20, 30) * size
    rows, columns, scale = cast(x, dtype, rows=True, columns=True)
    assert rows is not None
    assert columns is not None
    assert torch.equal(columns.float(), rows.float().T)
    found, largest = rows.float() * scale, x.float().abs().max()
    smallest = largest * torch.finfo(dtype).smallest_normal / torch.finfo(dtype).max
    lost = (found - x.float()).abs()
    assert bool((lost <= LOST[dtype] * x.float().abs().clamp_min(smallest) * (1 + 1e-6)).all())


def test_zeros_are_cast_by_a_finite_factor() -> None:
    rows, _, scale = cast(torch.zeros(4, 8), VALUES, rows=True, columns=False)
    assert rows is not None
    assert not rows.float().any()
    assert float(scale) == pytest.approx(LEAST_LARGEST / torch.finfo(VALUES).max)


def _by_hand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What 8 bits keep of x, in fp64."""
    rows, _, scale = cast(x.flatten(0, -2), dtype, rows=True, columns=False)
    assert rows is not None
    return (rows.double() * scale.double()).view(x.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("summed", [True, False])
def test_every_product_is_of_cast_factors(device: str, *, summed: bool) -> None:
    """A product, its input's and its weights' gradients, of two weights with one input."""
    x = _random(0, 2, 16, 32, device=device).requires_grad_()
    p = {
        "a.weight": _random(1, 48, 32, device=device),
        "b.weight": _random(2, 16, 32, device=device),
        "b.bias": _random(3, 16, device=device),
    }
    gradients = _random(4, 2, 16, 48, device=device), _random(5, 2, 16, 16, device=device)
    sums = Sums() if summed else None
    totals = {name: torch.ones(*p[name].shape, device=device) for name in ("a.weight", "b.weight")}
    leaves = p if summed else {name: t.clone().requires_grad_() for name, t in p.items()}
    outputs = Products(sums=sums, matrices=EightBits()).linears(leaves, ("a", "b"), x)
    small, weights = _by_hand(x.detach(), VALUES), [_by_hand(p[n], VALUES) for n in totals]
    exact = [F.linear(small, w) for w in weights]
    exact[1] += p["b.bias"].double()
    for output, value in zip(outputs, exact, strict=True):
        torch.testing.assert_close(output.double(), value, rtol=2**-7, atol=0.02)
    by = [_by_hand(gradient, GRADIENTS).flatten(0, 1) for gradient in gradients]
    asked = [x] if summed else [x, leaves["a.weight"], leaves["b.weight"]]
    if sums is not None:
        sums.open(totals, fresh=False)
    by_x, *by_weights = torch.autograd.grad(outputs, asked, gradients)
    expected = sum(g @ w for g, w in zip(by, weights, strict=True))
    torch.testing.assert_close(by_x.double().flatten(0, 1), expected, rtol=2**-6, atol=0.1)
    found = [totals[name] - 1 for name in totals] if summed else by_weights
    for total, gradient in zip(found, by, strict=True):
        value = gradient.T @ small.flatten(0, 1)
        torch.testing.assert_close(total.double(), value, rtol=2**-7, atol=0.05)
