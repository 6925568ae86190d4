"""Experts of several ranks on GPUs: kernels for rows that vary in number, and NCCL's exchanges."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bigplan.graph.graph import Recompute
from bigplan.plan import Plan
from bigplan.runtime import generated
from bigplan.runtime.experts import mlp as expert_mlp
from bigplan.runtime.experts.expert_parallel import ExpertParallel
from bigplan.runtime.experts.mixture import EXPERTS, ROUTER, Mixture
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.parallel.group import ALONE, RankGroup
from bigplan.spec.model import ModelSpec
from tests.runtime.experts.courses import layouts, plan_for
from tests.runtime.harness import execute
from tests.runtime.neighbours import side_by_side
from tests.runtime.parallel.sharded_ranks import results, run_rank, write_plans
from tests.runtime.parallel.test_sharded_gpu import on_gpu
from tests.runtime.plans import tiny_model, tiny_training
from tests.runtime.rounding import BF16_LOSS

pytestmark = pytest.mark.gpu

TOKENS, RANKS = 1024, 4
# Products of some hundred terms in fp32, rounded to bf16 a few times: test_experts_gpu.py's.
APART = 2**-7
LOSS = 1e-4  # relative, of fp32 on a GPU, in another order, after some steps of AdamW


class _Case(NamedTuple):
    """Parameters of experts, all tokens of all ranks, and gradients by what comes of them."""

    model: ModelSpec
    p: dict[str, Tensor]
    x: Tensor
    normed: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, *, one: bool) -> _Case:
        """`one`: all tokens choose the same experts, those of the first rank."""
        sizes = {"hidden": 256, "ffn": 384, "heads": 8, "experts": 16, "experts_per_token": 4}
        model = tiny_model(layers=1, **sizes)
        made = torch.Generator().manual_seed(1)

        def make(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=made) * 0.1).to("cuda", torch.bfloat16)

        p = {q.name: make(*q.shape) for q in model.kinds()["block"] if q.name in EXPERTS}
        x, normed, gradient = (make(RANKS, TOKENS // RANKS, 256) for _ in range(3))
        if one:
            normed[..., 0] = 10.0
            p[ROUTER][:, 0] = 0.0
            p[ROUTER][:4, 0] = 5.0
        return cls(model, p, x, normed, gradient)

    def run(self, group: RankGroup) -> list[Tensor]:
        """Output, gradients by both inputs, and sums of gradients, of a rank's part."""
        p = {name: _own(name, values, self.model, group) for name, values in self.p.items()}
        x, normed, gradient = (
            group.own(one).clone() for one in (self.x, self.normed, self.gradient)
        )
        sums = Sums()
        sums.open(
            {n: torch.full(t.shape, torch.nan, device="cuda") for n, t in p.items()}, fresh=True
        )
        library = generated.library_for(tiny_training(1, precision="bf16"), x.device)
        rows = generated.rows_of(library)
        how = Mixture(sums=sums, gated=True, rows=rows, spread=ExpertParallel(group))
        leaves = x.requires_grad_(), normed.requires_grad_()
        output = expert_mlp.mlp(p, *leaves, self.model, how)
        found = torch.autograd.grad(output, leaves, gradient)
        return [output.detach(), *found, *(sums.totals[name] for name in p)]


def _own(name: str, values: Tensor, model: ModelSpec, group: RankGroup) -> Tensor:
    """A rank's experts; rows of all take turns."""
    if name == ROUTER:
        return values
    each = values.view(model.ffn, model.experts, -1)
    return each.tensor_split(group.size, dim=1)[group.place].flatten(0, 1).contiguous()


def _together(name: str, parts: list[Tensor], model: ModelSpec) -> Tensor:
    if name == ROUTER:
        return torch.stack(parts).sum(0)
    return torch.cat([one.view(model.ffn, -1, model.hidden) for one in parts], 1).flatten(0, 1)


@pytest.mark.parametrize("one", [False, True])
def test_ranks_compute_what_one_does(*, one: bool) -> None:
    """As threads with one GPU; where all tokens like experts of one rank, others get no row."""
    case = _Case.of(one=one)
    with torch.autograd.set_multithreading_enabled(False):
        alone = case.run(ALONE)
    ranks, _ = side_by_side(RANKS, case.run)
    found = [torch.cat([rank[i] for rank in ranks]) for i in range(3)]
    found += [
        _together(name, [rank[3 + i] for rank in ranks], case.model)
        for i, name in enumerate(case.p)
    ]
    for ours, wanted in zip(found, alone, strict=True):
        assert float((ours.double() - wanted.double()).norm() / wanted.double().norm()) < APART


def _plans(ranks: int) -> dict[str, Plan]:
    found = {}
    for name, (strategy, recompute) in layouts(ranks).items():
        for precision in ("fp32", "bf16"):
            plan = on_gpu(plan_for("beside", strategy, recompute))
            training = plan.training.model_copy(update={"precision": precision})
            found[f"{precision}-{name}"] = plan.model_copy(update={"training": training})
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_train_as_one_does(ranks: int, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Over NCCL where each has a GPU; two of them share one by way of host memory."""
    gpus = torch.cuda.device_count()
    if ranks > max(2, gpus):
        pytest.skip(f"{ranks} ranks want as many GPUs; here are {gpus}")
    plans, own_gpu = _plans(ranks), gpus >= ranks
    write_plans(tmp_path, plans)
    given = str(tmp_path), None if own_gpu else "gloo", own_gpu
    spawn(run_rank, given, nprocs=ranks)  # type: ignore[no-untyped-call]
    for precision, apart in (("fp32", LOSS), ("bf16", BF16_LOSS)):
        one = on_gpu(plan_for("beside", recompute=Recompute.FULL))
        training = one.training.model_copy(update={"precision": precision})
        wanted = execute(one.model_copy(update={"training": training})).losses
        for name in (name for name in plans if name.startswith(precision)):
            with subtests.test(name):
                runs = results(tmp_path, name, ranks)
                assert len({run.finished.digest for run in runs}) == 1
                for run in runs:
                    assert run.losses == pytest.approx(wanted, rel=apart)
