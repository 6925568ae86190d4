"""Families' blocks on a GPU: the kernel of capped scores at its real width, and whole runs."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.runtime.attention import capped
from bigplan.runtime.attention.in_blocks import Scores
from tests.runtime.experts import courses
from tests.runtime.harness import execute
from tests.runtime.parallel import sharded_ranks as ranks
from tests.runtime.parallel.sharded_ranks import FAMILIES
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.runtime.rounding import check_within_rounding
from tests.toys import kind_placement

pytestmark = pytest.mark.gpu

APART = 2**-6  # bf16 rounds scores' shares and their gradients in other places


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("width", [128, 256])
def test_capped_scores_at_the_kernels_own_tiles(width: int, window: int | None) -> None:
    made = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (2, 1000, heads, width)
        values = torch.randn(shape, generator=made, device="cuda", dtype=torch.bfloat16)
        return values.requires_grad_()

    leaves, by_out = [draw(8), draw(4), draw(4)], draw(8).detach()
    scores, found = Scores(width**-0.5, 2.0, window), []
    for generated in (False, True):
        out = capped.attention(leaves[0], leaves[1], leaves[2], scores, generated=generated)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, by_out)))
    for ours, others in zip(found[1], found[0], strict=True):
        apart = (ours.double() - others.double()).norm() / others.double().norm()
        assert float(apart) < APART


NEMOTRON = {"norm": "layernorm", "norm_plus_one": True, "mlp": "relu2", "head_bias": True}


@pytest.mark.parametrize("family", [*FAMILIES, "nemotron"])
@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL])
def test_an_fp32_run_is_the_plain_loop(family: str, recompute: Recompute) -> None:
    again = kind_placement(3).model_copy(update={"activations": {recompute: {Tier.GPU: 3}}})
    placement = placed(embedding=kind_placement(1), block=again, head=kind_placement(1))
    training = tiny_training(2)
    plan = plan_of(
        tiny_model(layers=3, **FAMILIES.get(family, NEMOTRON)),
        training,
        Strategy(dp=1),
        placement,
        "cuda",
    )
    check_within_rounding(plan, execute(plan))


UNLIKE: dict[str, dict[str, object]] = {
    "falcon-h1": ranks.FALCON_H1,
    "gemma-4": ranks.GEMMA4,
    "llama-4": ranks.EXPERTS | courses.LLAMA_4 | {"router_loss": 0.0},
    "nemotron-3": ranks.NEMOTRON_3,
    "olmo-1": {"norm": "layernorm", "norm_bias": False, "weightless_norms": "all"},
    "qwen3-next": ranks.QWEN3_NEXT,
    "unnormed state space": ranks.BESIDE_UNNORMED,
}


@pytest.mark.parametrize("family", UNLIKE)
def test_an_fp32_run_of_unlike_blocks_is_the_plain_loop(family: str) -> None:
    model = tiny_model(layers=3, **UNLIKE[family])
    found = ranks.anywhere(model, tiny_training(2, clip_norm=0.5), Strategy(dp=1))
    plan = plan_of(model, found.training, found.strategy, found.placement, "cuda")
    check_within_rounding(plan, execute(plan))
