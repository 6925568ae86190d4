"""GPUs with micro-batches of unlike sizes train as a plain loop on the CPU does.

With two GPUs over NCCL, each as a group of its own; on one GPU two ranks share it, through gloo.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.multiprocessing.spawn import spawn

from bigplan.plan import Plan
from tests.runtime.harness import together
from tests.runtime.parallel.sharded_ranks import (
    check_same_model,
    results,
    run_rank,
    unequal,
    write_plans,
)
from tests.runtime.parallel.test_sharded_gpu import by_torch, on_gpu
from tests.runtime.rounding import check_within_rounding

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [2, 4])
def test_unlike_sizes_train_as_a_plain_loop_does(
    ranks: int, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    gpus = torch.cuda.device_count()
    if ranks > max(2, gpus):
        pytest.skip(f"{ranks} ranks want as many GPUs; here are {gpus}")
    own_gpu = gpus >= ranks
    plans: dict[str, Plan] = {name: by_torch(on_gpu(p)) for name, p in unequal(ranks).items()}
    write_plans(tmp_path, plans)
    given = str(tmp_path), None if own_gpu else "gloo", own_gpu
    spawn(run_rank, given, nprocs=ranks)  # type: ignore[no-untyped-call]
    torch.set_float32_matmul_precision("highest")
    for name, plan in plans.items():
        with subtests.test(name):
            runs = results(tmp_path, name, ranks)
            check_within_rounding(plan, together(runs))
            check_same_model(runs)
