"""Derivatives of the operators that are written out."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from bigplan.runtime import operators


def test_autograd_functions_have_the_right_derivative() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    up = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    rope = torch.randn(2, 5, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: operators.rotary(x, *rope), (x,))
    assert torch.autograd.gradcheck(operators.swiglu, (x, up))


def test_rms_norm_gradient_equals_torch() -> None:
    x = torch.randn(4, 33, requires_grad=True)
    weight = torch.randn(33, requires_grad=True)
    ours = torch.autograd.grad(
        operators.rms_norm(x, weight, operators.RmsRule(1e-5))[0].square().sum(), (x, weight)
    )
    plain = torch.nn.functional.rms_norm(x, (33,), weight, 1e-5)
    theirs = torch.autograd.grad(plain.square().sum(), (x, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biased", [True, False])
def test_layer_norm_gradient_equals_torch(biased: bool) -> None:
    x, weight = torch.randn(4, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    bias = torch.randn(33, requires_grad=True) if biased else None
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    ours = torch.autograd.grad(operators.layer_norm(x, weight, bias, 1e-5).square().sum(), leaves)
    plain = torch.nn.functional.layer_norm(x, (33,), weight, bias, 1e-5)
    theirs = torch.autograd.grad(plain.square().sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_gradient_beside_is_added_and_may_be_written_over() -> None:
    x, weight = torch.randn(4, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    normed, same = operators.rms_norm(x, weight, operators.RmsRule(1e-5))
    by_norm, by_same = torch.randn(2, 4, 33).unbind()
    expected = torch.autograd.grad((normed, same), (x, weight), (by_norm, by_same.clone()))
    alone = torch.autograd.grad(
        operators.rms_norm(x, weight, operators.RmsRule(1e-5))[0], x, by_norm
    )
    torch.testing.assert_close(expected[0], alone[0] + by_same)
    over = operators.rms_norm(x, weight, operators.RmsRule(1e-5), over=True)
    kept = by_same.clone()
    found = torch.autograd.grad(over, (x, weight), (by_norm, kept))
    assert found[0].data_ptr() == kept.data_ptr()
    for one, two in zip(found, expected, strict=True):
        assert torch.equal(one, two)
