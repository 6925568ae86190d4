"""Latent attention on a GPU: the kernels of narrow values at DeepSeek's widths, and a whole run."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.graph.strategy import Strategy
from bigplan.runtime.attention import cudnn, narrow_values
from tests.runtime.attention.test_latent import by_softmax
from tests.runtime.harness import execute
from tests.runtime.parallel.sharded_ranks import LATENT
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.runtime.rounding import check_within_rounding
from tests.toys import kind_placement

pytestmark = pytest.mark.gpu

APART = 2**-6  # bf16 rounds scores' shares and their gradients in other places


@pytest.mark.parametrize(("width", "values"), [(192, 128), (96, 64), (192, 192)])
@pytest.mark.parametrize("same_bits", [False, True])
def test_narrow_values_in_16_bits(width: int, values: int, *, same_bits: bool) -> None:
    """By cuDNN where it takes them, and padded where the same bits are wanted."""
    made = torch.Generator("cuda").manual_seed(0)

    def draw(columns: int) -> Tensor:
        found = torch.randn((2, 600, 4, columns), generator=made, device="cuda")
        return found.bfloat16().requires_grad_()

    q, k, v = leaves = [draw(width), draw(width), draw(values)]
    by_out = draw(values).detach()
    torch.use_deterministic_algorithms(same_bits)
    try:
        out = narrow_values.attention(q, k, v, 0.1)
        found = (out.detach(), *torch.autograd.grad(out, leaves, by_out))
    finally:
        torch.use_deterministic_algorithms(False)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    q, k, v = wide
    expected = by_softmax(q, k, v, 0.1)
    exact = (expected.detach(), *torch.autograd.grad(expected, wide, by_out.double()))
    for ours, theirs in zip(found, exact, strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < APART


def test_cudnn_takes_deepseeks_widths_on_hopper() -> None:
    """Which the description of these GPUs promises (narrow_values)."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    heads = [torch.empty(1, 2, 256, d, device="cuda").bfloat16() for d in (192, 192, 128)]
    assert cudnn.takes(heads)


def test_an_fp32_run_is_the_plain_loop() -> None:
    placement = placed(embedding=kind_placement(1), block=kind_placement(3), head=kind_placement(1))
    training = tiny_training(2)
    plan = plan_of(tiny_model(layers=3, **LATENT), training, Strategy(dp=1), placement, "cuda")
    check_within_rounding(plan, execute(plan))
