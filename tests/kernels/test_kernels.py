"""Each kernel gives what plain torch gives in fp64: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigplan.kernels import cross_entropy, rms_norm, rotary, swiglu
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


@given(st.integers(1, 3000), st.integers(0, 99))
@runs
def test_swiglu(count: int, seed: int) -> None:
    gate, up, gradient = (_random(seed + i, count) * 3 for i in range(3))
    wide = [gate.double().requires_grad_(), up.double().requires_grad_()]
    expected = swiglu.reference(*wide)
    _close(swiglu.forward(gate, up), expected.detach())
    by_gate, by_up = torch.autograd.grad(expected, wide, gradient.double())
    ours = swiglu.backward(gate, up, gradient)
    _close(ours[0], by_gate)
    _close(ours[1], by_up)
    out = gradient.clone()
    with_output = swiglu.backward(gate, up, out, out)
    assert all(torch.equal(one, other) for one, other in zip(with_output, ours, strict=True))
    assert torch.equal(out, swiglu.forward(gate, up))


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 99))
@runs
def test_rms_norm(rows: int, width: int, seed: int) -> None:
    x, weight, gradient = (
        _random(seed, rows, width),
        _random(seed + 1, width),
        _random(2, rows, width),
    )
    wide = [x.double().requires_grad_(), weight.double().requires_grad_()]
    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    expected = rms_norm.reference(wide[0], wide[1], 1e-5)
    out, rstd = rms_norm.forward(x, weight, 1e-5)
    _close(out, expected.detach())
    _close(rstd, scale)
    by_x, by_weight = torch.autograd.grad(expected, wide, gradient.double())
    ours = rms_norm.backward(x, weight, rstd, gradient)
    # The two terms of the gradient cancel where a row has few elements.
    assert float((ours[0].double() - by_x).norm()) < FP32 * float((scale * gradient).norm() + 1)
    _close(ours[1], by_weight)
    beside = _random(seed + 3, rows, width)
    added = rms_norm.backward(x, weight, rstd, gradient, beside)
    assert torch.equal(added[1], ours[1])
    torch.testing.assert_close(added[0], ours[0] + beside)
    over = rms_norm.backward(x, weight, rstd, gradient, beside, over=True)
    assert over[0] is beside
    torch.testing.assert_close(over, added, rtol=0, atol=0)


@given(
    st.tuples(st.integers(1, 2), st.integers(1, 17), st.integers(1, 5)),
    st.integers(1, 20),
    st.sampled_from((0, 1, 7, 30)),
    st.integers(0, 99),
)
@runs
def test_rotary(sizes: tuple[int, int, int], half: int, rest: int, seed: int) -> None:
    """All of a head, or its first columns."""
    x, angles = _random(seed, *sizes, 2 * half + rest), _random(seed + 1, sizes[1], half)
    cos, sin = angles.cos(), angles.sin()
    expected = rotary.reference(x.double(), cos.double(), sin.double())
    turned = rotary.rotate(x, cos, sin)
    _close(turned, expected)
    _close(rotary.rotate(turned, cos, sin, back=True), x.double())


def test_rotary_of_heads_that_lie_among_others() -> None:
    """Queries may be a part of a wider tensor: only the stride between tokens differs."""
    whole = _random(0, 2, 8, 6, 16)
    cos, sin = _random(1, 8, 8).cos(), _random(1, 8, 8).sin()
    part = whole[:, :, :4]
    assert torch.equal(rotary.rotate(part, cos, sin), rotary.rotate(part.contiguous(), cos, sin))


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
