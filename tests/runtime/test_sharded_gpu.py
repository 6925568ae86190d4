"""Two processes that share a GPU and share out state compute what a plain loop on the CPU does.

NCCL takes no two ranks of one GPU, so their collectives go through host memory; streams, slots and
parts are those of any CUDA run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.multiprocessing.spawn import spawn

from bigplan.plan import Plan
from tests.runtime.harness import loop_of, together
from tests.runtime.rounding import BF16_LOSS, check_within_rounding
from tests.runtime.sharded_ranks import cases, random_plans, results, run_rank, write_plans

pytestmark = pytest.mark.gpu

RANKS = 2
Ran = tuple[Path, dict[str, Plan]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Both have executed every plan."""
    folder = tmp_path_factory.mktemp("sharded-gpu")
    plans = {
        f"{name}-z{zero}": on_gpu(plan)
        for zero in (1, 2, 3)
        for name, plan in cases(RANKS, zero).items()
        if plan.training.precision == "fp32"
    }
    plans |= random_plans(RANKS, 12, ("fp32",), "cuda") | random_plans(RANKS, 6, ("bf16",), "cuda")
    write_plans(folder, plans)
    spawn(run_rank, (str(folder), "gloo"), nprocs=RANKS)  # type: ignore[no-untyped-call]
    torch.set_float32_matmul_precision("highest")
    return folder, plans


def on_gpu(plan: Plan) -> Plan:
    """The same plan for a GPU."""
    group = plan.cluster.group
    gpu = group.gpu.model_copy(update={"device": "cuda"})
    groups = (group.model_copy(update={"gpu": gpu}),)
    return plan.model_copy(
        update={"cluster": plan.cluster.model_copy(update={"node_groups": groups})}
    )


def test_they_train_as_a_plain_loop_does(ran: Ran, subtests: pytest.Subtests) -> None:
    folder, plans = ran
    for name, plan in plans.items():
        with subtests.test(name):
            run = together(results(folder, name, RANKS))
            if plan.training.precision == "fp32":
                check_within_rounding(plan, run)
                continue
            loop = loop_of(plan)
            for loss in run.losses:
                assert loss == pytest.approx(loop.step().loss, rel=BF16_LOSS)


def test_they_end_with_the_same_model(ran: Ran, subtests: pytest.Subtests) -> None:
    folder, plans = ran
    for name in plans:
        with subtests.test(name):
            first, second = results(folder, name, RANKS)
            assert first.finished.digest == second.finished.digest
            assert first.losses == second.losses
