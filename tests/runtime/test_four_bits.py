"""Runs beside frozen matrices in 4 bits compute what a plain loop with these matrices computes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from bigplan.graph.graph import Recompute
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.spec.optimizer import Optimizer
from tests.runtime import lora_ranks
from tests.runtime.lora_loop import LoraLoop
from tests.runtime.lora_ranks import LORA, LoraRun, frozen
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.runtime.processes import start
from tests.runtime.test_lora import CLOSE, check_steps

NF4 = {**LORA, "frozen": "nf4"}
WIDE = {"hidden": 128, "ffn": 256}  # two ranks still have whole blocks of 64 in every row
# Wide sums round more; gradients of A, which are zeros at first, would make steps of that.
OPTIMIZER = Optimizer(learning_rate=1e-2, epsilon=1e-4)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def plan(tier: Tier, recompute: Recompute) -> Plan:
    """Two blocks with their matrices in 4 bits."""
    blocks = frozen(2, tier, recompute)
    return plan_of(
        tiny_model(**WIDE),
        tiny_training(4, lora=NF4, optimizer=OPTIMIZER),
        lora_ranks.layouts(2)["tp2"].model_copy(update={"tp": 1}),
        placed(embedding=frozen(1), block=blocks, head=frozen(1), slots=2),
    )


@pytest.mark.parametrize("tier", list(Tier), ids=str)
def test_a_run_is_the_plain_loop(tier: Tier) -> None:
    check_steps(plan(tier, Recompute.NONE), steps=2)


@pytest.mark.parametrize("recompute", list(Recompute), ids=str)
def test_blocks_may_be_recomputed(recompute: Recompute) -> None:
    check_steps(plan(Tier.HOST, recompute), steps=2)


@pytest.mark.timeout(300)
def test_ranks_train_as_one_does(tmp_path: Path, subtests: pytest.Subtests) -> None:
    found = lora_ranks.plans(2, clip_norm=1e-3)
    every = {
        name: plan_of(
            tiny_model(layers=4, **WIDE),
            tiny_training(4, clip_norm=1e-3, lora=NF4, optimizer=OPTIMIZER),
            found[name].strategy,
            found[name].placement,
        )
        for name in ("dp2-zero3", "tp2", "pp2-vpp2")
    }
    (tmp_path / "plans").write_bytes(pickle.dumps(every))
    start(lora_ranks.run_rank, tmp_path, 2)
    loop = LoraLoop(next(iter(every.values())))
    losses = [loop.step() for _ in range(2 * lora_ranks.STEPS)]
    for name in every:
        with subtests.test(name):
            runs: list[LoraRun] = [
                torch.load(tmp_path / f"{name}.{rank}.pt", weights_only=False) for rank in range(2)
            ]
            assert len({run.digest for run in runs}) == 1
            for run in runs:
                assert run.losses == pytest.approx(losses, rel=CLOSE)
