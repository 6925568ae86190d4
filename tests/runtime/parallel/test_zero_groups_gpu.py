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
from tests.runtime.parallel.sharded_ranks import (
    MASKED,
    check_same_model,
    results,
    run_rank,
    write_plans,
)
from tests.runtime.parallel.test_sharded_gpu import by_torch, on_gpu
from tests.runtime.parallel.zero_group_ranks import zero_group_cases
from tests.runtime.rounding import BF16_LOSS, check_within_rounding

pytestmark = pytest.mark.gpu

LOSS = 1e-5  # relative, of fp32 in another order
WHOLE = "resident-z2"


def _cases(ranks: int) -> dict[str, Plan]:
    """On every tier by each stage of ZeRO, of sequences in parts, in bf16; one over all ranks, too.

    Each takes seconds to start.
    """
    every = zero_group_cases(ranks)
    wanted = [name for name in every if name.removeprefix(f"{MASKED}-").startswith("dp")]
    if ranks == 4:
        wanted = [*wanted[:3], wanted[-1], WHOLE, "narrow"]
    # By other names, as what is called masked validates too, here all of the bundled text.
    plans = {name.removeprefix(f"{MASKED}-"): by_torch(on_gpu(every[name])) for name in wanted}
    if WHOLE in plans:
        whole = plans[WHOLE].strategy.model_copy(update={"zero_group": 0})
        plans[f"all-{WHOLE}"] = plans[WHOLE].model_copy(update={"strategy": whole})
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
    torch.set_num_threads(1)  # tiny operators of the plain loop: two took 20 times as long
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
    if WHOLE in plans:
        groups, whole = (results(tmp_path, name, ranks)[0] for name in (WHOLE, f"all-{WHOLE}"))
        assert groups.losses == pytest.approx(whole.losses, rel=LOSS)
