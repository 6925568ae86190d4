"""Shared experts, dense first blocks and routers by sigmoids on a GPU: whole runs, and kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.runtime import generated
from bigplan.runtime.experts import shared
from bigplan.runtime.mixers.ways import keep
from tests.runtime.harness import execute
from tests.runtime.parallel.sharded_ranks import BESIDE
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.runtime.rounding import check_within_rounding
from tests.toys import kind_placement

pytestmark = pytest.mark.gpu

APART = 2**-6  # bf16 rounds the activation, its weight and their gradients in other places


@pytest.mark.parametrize("recompute", list(Recompute))
def test_an_fp32_run_is_the_plain_loop(recompute: Recompute) -> None:
    again = recompute, Tier.GPU
    placement = placed(
        embedding=kind_placement(1),
        dense=kind_placement(1, activations=again),
        block=kind_placement(2, activations=again),
        head=kind_placement(1),
    )
    plan = plan_of(
        tiny_model(layers=3, **BESIDE), tiny_training(2), Strategy(dp=1), placement, "cuda"
    )
    check_within_rounding(plan, execute(plan))


def test_the_gates_kernels_compute_what_torchs_operators_do() -> None:
    made = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made, device="cuda", dtype=torch.bfloat16)

    gate, up, score = (draw(2, 300, n).requires_grad_() for n in (512, 512, 1))
    by_inner, found = draw(2, 300, 512), []
    for library in (None, generated.library_for(tiny_training(1, precision="bf16"), gate.device)):
        activation = generated.rows_of(library).activation("swiglu", "outputs")
        inner = shared.gated_by_score(activation, (gate, up), score, keep)
        by = torch.autograd.grad(inner, [gate, up, score], by_inner.clone())
        found.append((inner.detach(), *by))
    for ours, plain in zip(found[1], found[0], strict=True):
        apart = (ours.double() - plain.double()).norm() / plain.double().norm()
        assert float(apart) < APART
