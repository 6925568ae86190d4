"""Fixed plans of two ranks, and the processes that execute them."""

from __future__ import annotations

from pathlib import Path

import torch

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement, Placement, Tier
from bigplan.plan import Plan
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.training import LossScale
from tests.runtime.execution.streamed import streamed_kind
from tests.runtime.harness import Run, execute
from tests.runtime.masked import masked_data, masked_training
from tests.runtime.plans import CHUNK, placed, plan_of, tiny_model, tiny_training
from tests.runtime.reference import INACTIVE
from tests.toys import kind_placement

WORLD = 2


def _spread(layers: int) -> KindPlacement:
    """Blocks with parameters, gradients and activations on every tier, rows on all three."""
    return KindPlacement(
        layers=layers,
        parameters={Tier.GPU: 1, Tier.HOST: layers - 2, Tier.NVME: 1},
        gradients={Tier.GPU: 1, Tier.HOST: layers - 2, Tier.NVME: 1},
        activations={
            Recompute.NONE: {Tier.NVME: 1, Tier.HOST: layers - 2},
            Recompute.FULL: {Tier.HOST: 1},
        },
        optimizer={Tier.GPU: 0.5, Tier.HOST: 0.75, Tier.NVME: layers - 1.25},
    )


def _away(layers: int) -> KindPlacement:
    """All layers streamed, their gradients summed on the host, updated there."""
    return kind_placement(
        layers, Tier.HOST, Tier.HOST, (Recompute.FULL, Tier.HOST), optimizer=Tier.HOST
    )


def _everywhere(chunk: int = CHUNK, slots: int = 2, *, tied: bool = False) -> Placement:
    return placed(
        slots=slots,
        chunk=chunk,
        embedding=kind_placement(1, optimizer=Tier.HOST) if tied else _away(1),
        block=_spread(3),
        head=kind_placement(1, Tier.HOST, Tier.HOST, optimizer=Tier.NVME),
    )


def _streaming(*, tied: bool = False) -> Placement:
    """State passes through the GPU, with gradients and parameters on either side."""
    block = _spread(3).model_copy(update={"streamed": 0.5})
    return placed(
        chunk=20_000,
        embedding=streamed_kind(Tier.GPU if tied else Tier.HOST, Tier.GPU, 0.6),
        block=block,
        head=streamed_kind(Tier.GPU, Tier.HOST, 1.0),
    )


MASKED = "same-masked"


def cases(data: str = "bundled") -> dict[str, Plan]:
    """By name; `data`: prompts and responses. Sums of `same` ones have the plain loop's order."""
    two = Strategy(dp=WORLD, accumulation_group=2)
    one = Strategy(dp=WORLD, micro_batch=2)
    resident = placed(embedding=kind_placement(1), block=kind_placement(3), head=kind_placement(1))
    model = tiny_model(layers=3)
    tied = tiny_model(layers=3, tied_embeddings=True)
    clipped, mixed = {"clip_norm": 0.5}, {"precision": "bf16", "clip_norm": INACTIVE}
    scaled = {  # the first steps overflow
        "precision": "fp16",
        "gradient_precision": "fp16",
        "loss_scale": LossScale(initial=2.0**20),
        "optimizer": Optimizer(name="sgd", learning_rate=0.5),
    }
    return {
        "same-resident": plan_of(model, tiny_training(8, clip_norm=INACTIVE), two, resident),
        MASKED: plan_of(model, masked_training(8, data), two, resident),
        "same-one-unit": plan_of(model, tiny_training(4), two, _everywhere(20_000)),
        "same-tied": plan_of(tied, tiny_training(4, **mixed), one, _everywhere(tied=True)),
        "same-streamed": plan_of(model, tiny_training(4), two, _streaming()),
        "same-streamed-tied": plan_of(tied, tiny_training(4, **mixed), one, _streaming(tied=True)),
        "units": plan_of(model, tiny_training(8), two, _everywhere()),
        "clipped": plan_of(model, tiny_training(8, **clipped), one, _everywhere(20_000, 1)),
        "fp16": plan_of(model, tiny_training(8, **scaled), two, _everywhere(20_000)),
        "fp16-streamed": plan_of(model, tiny_training(8, **scaled), two, _streaming()),
        "tied": plan_of(tied, tiny_training(8, **mixed, seed=1), two, _everywhere(tied=True)),
    }


def run_rank(rank: int, folder: str) -> None:
    """One process: execute every case and leave what it computed in the folder."""
    torch.set_num_threads(1)
    for name, plan in cases(str(masked_data(folder))).items():
        meeting = Path(folder) / f"{name}.meeting"
        run = execute(plan, rank=rank, meeting=meeting, validates=name == MASKED)
        torch.save(run, _result(folder, name, rank))


def result(folder: str, name: str, rank: int) -> Run:
    """What a rank left."""
    run = torch.load(_result(folder, name, rank), weights_only=False)  # our own file
    assert isinstance(run, Run)
    return run


def _result(folder: str, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}.{rank}.pt"
