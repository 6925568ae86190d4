"""Batch norm taken apart: the numbers of fp64, fused with its neighbours, in both memory orders."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigplan.kernels.fusion.keep import KeepPlan
from bigplan.kernels.optimised import optimise
from tests.kernels.generated import DEVICE, ResidualBlock, error, every_operator_generated, random

FP32 = 3e-6  # as in test_generated.py
MEMORY = {"rows": torch.contiguous_format, "channels last": torch.channels_last}
orders = pytest.mark.parametrize("order", MEMORY)


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    """A GPU's convolutions round fp32 to 10 bits otherwise."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def _results(module: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    out = module(leaf)
    wanted = [leaf, *module.parameters()]
    found = torch.autograd.grad(out, wanted, gradient.to(out.dtype))
    return [out.detach(), *found, *module.buffers()]


@pytest.mark.parametrize(
    ("order", "training"), [("channels last", True), ("rows", True), ("rows", False)]
)
def test_a_residual_block(order: str, training: bool) -> None:
    torch.manual_seed(0)
    block = ResidualBlock().to(DEVICE)
    for norm in (block.norm_1, block.norm_2):
        norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    twin = copy.deepcopy(block).double().train(training)
    ours = block.to(memory_format=MEMORY[order]).train(training)  # type: ignore[call-overload]
    start = copy.deepcopy(ours)  # buffers change
    x = (random(0, 3, 4, 3, 5) + 3).contiguous(memory_format=MEMORY[order])
    gradient = random(1, 3, 4, 3, 5)
    with every_operator_generated():
        fused = optimise(ours, price=1e-10)  # so that all that can be is computed again
        found = _results(fused, x, gradient)
    # A GPU's convolutions in this order are off by up to 3e-4 in fp32 by themselves, plain too.
    plain = _results(start, x, gradient)
    exact = _results(twin, x.double(), gradient)
    for one, usual, right in zip(found, plain, exact, strict=True):
        assert error(one, right.double()) < FP32 * 3 + 2 * error(usual, right.double())
    assert found[0].stride() == x.stride()
    left = {u.name for u in fused.kernels.plans[0].cover.units if u.fused is None}
    assert left <= {"convolution", "convolution_backward", "add"}  # the batches tracked are int64


@orders
def test_a_large_mean_loses_no_digits(order: str) -> None:
    """A variance as a difference of squares would be all rounding here."""
    x = (random(0, 4, 3, 4, 4) + 1000).contiguous(memory_format=MEMORY[order])

    def function(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)

    with every_operator_generated():
        found = optimise(function)(x.requires_grad_())
    # Each x is rounded to 3e-5 of what it deviates by.
    assert error(found.detach(), function(x.detach().double())) < 1e-4


def _planned(price: float) -> KeepPlan:
    block = ResidualBlock(64).to(DEVICE, torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.zeros(8, 64, 28, 28, dtype=torch.bfloat16, device=DEVICE)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    plan: KeepPlan = optimise(block, [x], gpu="h200-sxm", price=price).kernels.plans[0]
    return plan


def test_a_price_on_what_is_kept_computes_the_relu_again() -> None:
    tensor = 8 * 64 * 28 * 28 * 2
    price = 1e-11
    free, dear = _planned(0.0), _planned(price)
    assert 3 * tensor <= free.kept_bytes < 3.1 * tensor  # two convolutions' results, and a ReLU's
    assert 2 * tensor <= dear.kept_bytes < 2.1 * tensor
    slower = dear.cover.seconds - free.cover.seconds
    assert 0 < slower < price * (free.kept_bytes - dear.kept_bytes)
