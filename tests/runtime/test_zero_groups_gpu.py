"""Zero groups on GPUs train as a plain loop on the CPU does, and as ZeRO over all GPUs does.

With four GPUs or more over NCCL: two communicators, whose collectives take turns on one stream. On
fewer, four ranks share one GPU, through gloo.
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
from tests.runtime.sharded_ranks import check_same_model, results, run_rank, write_plans
from tests.runtime.test_sharded_gpu import by_torch, on_gpu
from tests.runtime.zero_group_ranks import zero_group_cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LOSS = 1e-5  # relative, of fp32 in another order


def _cases(ranks: int) -> dict[str, Plan]:
    """Those without overflow, each with its like over all ranks."""
    plans: dict[str, Plan] = {}
    for name, plan in zero_group_cases(ranks).items():
        if plan.training.precision != "fp16":
            whole = plan.strategy.model_copy(update={"zero_group": 0})
            plans[name] = by_torch(on_gpu(plan))
            plans[f"all-{name}"] = plans[name].model_copy(update={"strategy": whole})
    return plans


@pytest.mark.parametrize("ranks", [4, 8])
def test_zero_groups_train_as_a_plain_loop_and_as_all_ranks_do(
    ranks: int, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    gpus = torch.cuda.device_count()
    if ranks > max(4, gpus):
        pytest.skip(f"{ranks} ranks want as many GPUs; here are {gpus}")
    own_gpu, plans = gpus >= ranks, _cases(ranks)
    write_plans(tmp_path, plans)
    given = str(tmp_path), None if own_gpu else "gloo", own_gpu
    spawn(run_rank, given, nprocs=ranks)  # type: ignore[no-untyped-call]
    torch.set_float32_matmul_precision("highest")
    for name, plan in plans.items():
        with subtests.test(name):
            runs = results(tmp_path, name, ranks)
            check_same_model(runs)
            if plan.training.precision == "fp32":
                check_within_rounding(plan, together(runs))
            else:
                loop = loop_of(plan)
                for loss in runs[0].losses:
                    assert loss == pytest.approx(loop.step().loss, rel=BF16_LOSS)
            if not name.startswith("all-"):
                whole = results(tmp_path, f"all-{name}", ranks)[0].losses
                within = LOSS if plan.training.precision == "fp32" else BF16_LOSS
                assert runs[0].losses == pytest.approx(whole, rel=within)
