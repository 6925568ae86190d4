"""Processes on GPUs that share out a step in any way compute what a plain loop on the CPU does.

Where there are GPUs enough each has one and they communicate over NCCL. NCCL takes no two ranks of
one GPU, so on a machine with one GPU two share it and their collectives go through host memory;
streams, slots and parts are those of any CUDA run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.multiprocessing.spawn import spawn

from bigplan.plan import Plan
from tests.runtime.harness import loop_of, together
from tests.runtime.masked import prepare_masked
from tests.runtime.parallel.context_ranks import plans as context_plans
from tests.runtime.parallel.sharded_ranks import (
    cases,
    random_plans,
    results,
    run_rank,
    split_cases,
    write_plans,
)
from tests.runtime.rounding import BF16_LOSS, check_within_rounding

# Kernels are compiled first, by each rank.
pytestmark = pytest.mark.gpu

Ran = tuple[int, Path, dict[str, Plan]]


@pytest.fixture(scope="module", params=[2, 4, 8])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Ranks, and a folder with what they computed of every plan."""
    ranks: int = request.param
    gpus = torch.cuda.device_count()
    if ranks > max(2, gpus):
        pytest.skip(f"{ranks} ranks want as many GPUs; here are {gpus}")
    own_gpu = gpus >= ranks
    folder = tmp_path_factory.mktemp(f"sharded-gpu-{ranks}")
    data = str(prepare_masked(str(folder)))
    fixed = {
        f"{name}-z{zero}": plan
        for zero in (1, 2, 3)
        for name, plan in cases(ranks, zero, data).items()
    } | split_cases(ranks, data)
    plans = {name: on_gpu(p) for name, p in fixed.items() if p.training.precision == "fp32"}
    drawn = random_plans(ranks, 12, ("fp32",), "cuda") | random_plans(ranks, 6, ("bf16",), "cuda")
    plans |= {name: by_torch(plan) for name, plan in drawn.items()}
    if ranks < 8:
        split = context_plans(ranks, data)
        plans |= {f"context-{name}": by_torch(on_gpu(plan)) for name, plan in split.items()}
    write_plans(folder, plans)
    given = str(folder), None if own_gpu else "gloo", own_gpu
    spawn(run_rank, given, nprocs=ranks)  # type: ignore[no-untyped-call]
    torch.set_float32_matmul_precision("highest")
    return ranks, folder, plans


def by_torch(plan: Plan) -> Plan:
    """The same plan with torch's kernels: each drawn model would want ten generated ones more."""
    training = plan.training.model_copy(update={"kernels": "torch"})
    return plan.model_copy(update={"training": training})


def on_gpu(plan: Plan) -> Plan:
    """The same plan for a GPU."""
    group = plan.cluster.group
    gpu = group.gpu.model_copy(update={"device": "cuda"})
    groups = (group.model_copy(update={"gpu": gpu}),)
    return plan.model_copy(
        update={"cluster": plan.cluster.model_copy(update={"node_groups": groups})}
    )


def test_they_train_as_a_plain_loop_does(ran: Ran, subtests: pytest.Subtests) -> None:
    ranks, folder, plans = ran
    for name, plan in plans.items():
        with subtests.test(name):
            run = together(results(folder, name, ranks))
            if plan.training.precision == "fp32":
                check_within_rounding(plan, run)
                continue
            loop = loop_of(plan)
            for loss in run.losses:
                assert loss == pytest.approx(loop.step().loss, rel=BF16_LOSS)


def test_they_end_with_the_same_model(ran: Ran, subtests: pytest.Subtests) -> None:
    ranks, folder, plans = ran
    for name in plans:
        with subtests.test(name):
            first, *others = results(folder, name, ranks)
            for other in others:
                assert first.finished.digest == other.finished.digest
                assert first.losses == other.losses
