"""Steps from CUDA graphs compute what steps launched by Python do, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.multiprocessing.spawn import spawn

from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.runtime.execution.repeated import RepeatedUpdates
from bigplan.runtime.experts import dispatch as experts
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.training import ValidationSpec
from tests.runtime.checkpoints import running
from tests.runtime.harness import Run, same, state_of, together
from tests.runtime.parallel.sharded_ranks import GPT_OSS, results, run_rank, write_plans
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training
from tests.runtime.reference import State
from tests.toys import kind_placement

pytestmark = pytest.mark.gpu

BLOCKS, STEPS = 3, 6
DEVICE = "cuda"
LLAMA: dict[str, object] = {}
GPT: dict[str, object] = {
    "norm": "layernorm",
    "mlp": "gelu_tanh",
    "positions": "learned",
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
}
ALIBI: dict[str, object] = {**GPT, "positions": "alibi", "sliding_window": 5}
MOE: dict[str, object] = {"ffn": 32, "experts": 4, "experts_per_token": 2, "router_loss": 0.1}
CASES: dict[str, tuple[dict[str, object], dict[str, object], Recompute, Tier, Tier]] = {
    "bf16": (LLAMA, {}, Recompute.NONE, Tier.GPU, Tier.GPU),
    "gpt": (GPT, {}, Recompute.NONE, Tier.GPU, Tier.GPU),
    "alibi": (ALIBI, {}, Recompute.NONE, Tier.GPU, Tier.GPU),
    "full": (LLAMA, {}, Recompute.FULL, Tier.GPU, Tier.GPU),
    "selective": (LLAMA, {}, Recompute.SELECTIVE, Tier.GPU, Tier.GPU),
    "mlp": (GPT, {}, Recompute.MLP, Tier.GPU, Tier.GPU),
    "fp32": (LLAMA, {"precision": "fp32"}, Recompute.NONE, Tier.GPU, Tier.GPU),
    "narrow": (LLAMA, {"gradient_precision": "bf16"}, Recompute.NONE, Tier.GPU, Tier.GPU),
    "fp16": (LLAMA, {"precision": "fp16"}, Recompute.NONE, Tier.GPU, Tier.GPU),  # skips steps
    "unclipped": (LLAMA, {"clip_norm": None}, Recompute.NONE, Tier.GPU, Tier.GPU),
    "away": (LLAMA, {}, Recompute.NONE, Tier.HOST, Tier.HOST),
    "torch": (GPT, {"kernels": "torch"}, Recompute.NONE, Tier.GPU, Tier.GPU),
    "experts": (MOE, {}, Recompute.NONE, Tier.GPU, Tier.GPU),
    "experts-mlp": (MOE, {}, Recompute.MLP, Tier.GPU, Tier.GPU),
    "experts-full": (MOE, {}, Recompute.FULL, Tier.GPU, Tier.GPU),
    "gpt-oss": (GPT_OSS, {}, Recompute.NONE, Tier.GPU, Tier.GPU),
    "gpt-oss-mlp": (GPT_OSS, {}, Recompute.MLP, Tier.GPU, Tier.GPU),
    "sgd": (LLAMA, {"optimizer": Optimizer(name="sgd")}, Recompute.NONE, Tier.GPU, Tier.GPU),
}


def _plan(name: str, group: int = 1, dp: int = 1, zero: int = 0) -> Plan:
    """Four micro-batches a step and rank."""
    shape, changes, recompute, parameters, optimizer = CASES[name]
    block = kind_placement(BLOCKS, parameters, parameters, (recompute, Tier.GPU), optimizer)
    placement = placed(embedding=kind_placement(1), block=block, head=kind_placement(1))
    settings = {"precision": "bf16", "clip_norm": 0.5, "deterministic": True, **changes}
    model = tiny_model(layers=BLOCKS, **shape)
    strategy = Strategy(dp=dp, zero=zero, accumulation_group=group)
    return plan_of(model, tiny_training(4 * dp, **settings), strategy, placement, DEVICE)


def _captured(plan: Plan) -> Plan:
    placement = plan.placement.model_copy(update={"captured": True})
    return plan.model_copy(update={"placement": placement})


def _run(plan: Plan) -> tuple[list[object], State, int]:
    """Losses and norms, the state at the end, and how many passes have graphs."""
    with running(plan) as (worker, _):
        results = [worker.step() for _ in range(STEPS)]
        graphs = len(worker._running().executor._graphs._passes)
        worker.finish()
        told = [(result.loss, result.gradient_norm, result.loss_scale) for result in results]
        return list(told), state_of(worker), graphs


@pytest.mark.parametrize("name", CASES)
def test_repeated_steps_have_the_same_bits(name: str) -> None:
    """`running` fills what is freed with NaNs, so a graph that reads any of it would show."""
    bf16 = torch.bfloat16
    if "experts" in name and not experts.stays_on_device(torch.device(DEVICE), bf16):
        pytest.skip("products of experts wait for numbers of rows on this GPU")
    plan = _plan(name)
    plain, repeated = _run(plan), _run(_captured(plan))
    assert plain[2] == 0
    assert repeated[2] == 2 * 4 * BLOCKS
    assert plain[0] == repeated[0]
    same("the last step", plain[1], repeated[1])


@pytest.mark.parametrize("name", ["bf16", "gpt", "narrow", "fp16", "unclipped", "away"])
def test_updates_alone_have_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Python launches the passes, beside copies of other lanes or without."""
    plan, replays = _plan(name), list[int]()
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    repeated = _run(plan)
    assert replays
    monkeypatch.setattr(RepeatedUpdates, "run", lambda self, action, verdict, apply: apply(None))
    plain = _run(plan)
    assert plain[0] == repeated[0]
    same("the last step", plain[1], repeated[1])


def test_micro_batches_that_go_through_layers_together() -> None:
    plan = _plan("bf16", group=2)
    plain, repeated = _run(plan), _run(_captured(plan))
    assert plain[0] == repeated[0]
    same("the last step", plain[1], repeated[1])


def test_validations_and_checkpoints_between_steps(tmp_path: Path) -> None:
    """An evaluation has no graphs and lets them be; a step that saves repeats them."""

    def course(plan: Plan, folder: Path) -> list[object]:
        validation = ValidationSpec(data=plan.training.data, batches=1)
        training = plan.training.model_copy(update={"validation": validation})
        plan, told = plan.model_copy(update={"training": training}), list[object]()
        with running(plan) as (worker, _):
            for number in range(STEPS):
                told.append(worker.step(folder if number == 3 else None).loss)
                told.append(worker.evaluate())
            worker.finish()
        with running(plan, folder / "step-000003") as (worker, done):
            told += [done, *(worker.step().loss for _ in range(STEPS))]
        return told

    plan = _plan("bf16")
    assert course(plan, tmp_path / "plain") == course(_captured(plan), tmp_path / "repeated")


def _told(run: Run) -> list[object]:
    return [(result.loss, result.gradient_norm) for result in run.results]


def test_data_parallel_ranks_repeat_their_passes(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Beside gathers and reductions of other lanes: over NCCL where each rank has a GPU."""
    own_gpu = torch.cuda.device_count() > 1
    every = [(name, zero) for name in ("bf16", "full") for zero in range(4)]
    plans = {
        f"{name}-z{zero}": _plan(name, dp=2, zero=zero)
        for name, zero in (*every, ("gpt", 2), ("away", 3))
    }
    write_plans(tmp_path, plans | {f"{name}-graphs": _captured(p) for name, p in plans.items()})
    given = str(tmp_path), None if own_gpu else "gloo", own_gpu
    spawn(run_rank, given, nprocs=2)  # type: ignore[no-untyped-call]
    for name in plans:
        with subtests.test(name):
            plain, repeated = (
                together(results(tmp_path, f"{name}{end}", 2)) for end in ("", "-graphs")
            )
            assert (plain.graphs, repeated.graphs) == (0, 2 * 4 * BLOCKS)
            assert _told(plain) == _told(repeated)
            for number, (one, other) in enumerate(zip(plain.states, repeated.states, strict=True)):
                same(f"step {number}", one, other)
