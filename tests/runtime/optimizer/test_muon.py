"""Muon beside torch.optim.Muon and AdamW, on every tier and in every split, and resumed."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.graph.graph import Tensor as Stored
from bigplan.graph.strategy import Strategy
from bigplan.mechanics import EXPERTS_AT_ONCE
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.runtime.checkpoint import latest
from bigplan.runtime.optimizer import muon
from bigplan.spec.optimizer import Optimizer, orthogonalised, rules
from tests.runtime.checkpoints import course
from tests.runtime.harness import Run, execute, loop_of, same
from tests.runtime.optimizer.muon_ranks import (
    AT,
    EXPERTS,
    LAYOUTS,
    MUON,
    STEPS,
    WITH_EXPERTS,
    layout_of,
    muon_plan,
    run_four,
    run_two,
)
from tests.runtime.processes import start
from tests.runtime.reference import PlainLoop

# A batch's products are added up in another order than one matrix's. Fifteen products follow each
# other, each rounded to bf16, and the iteration's factor of 3.4 enlarges what is small.
OFF = 0.05
# Of losses after steps that move matrices so: directions differ by bf16's roundings alone.
NEAR = 2e-3


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("shape", [(32, 64), (64, 32), (48, 48), (1, 32)])
@pytest.mark.parametrize("name", ["match_rms_adamw", "original"])
def test_a_matrix_moves_as_by_torch(shape: tuple[int, int], name: str) -> None:
    """Bit by bit: the same products in the same order, and decay before the step."""
    optimizer = Optimizer(name="muon", adjust_lr_fn=name)
    leaf = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    ours, momentum = leaf.detach().clone(), torch.zeros(shape)
    theirs = torch.optim.Muon([leaf], lr=0.01, weight_decay=0.1, adjust_lr_fn=name)
    stored = Stored("q_proj.weight", *shape)
    for step in range(3):
        leaf.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        momentum.lerp_(leaf.grad, 1 - optimizer.momentum)
        given = leaf.grad.lerp(momentum, optimizer.momentum).bfloat16()
        direction = muon.orthogonalised(given.flatten(), stored, optimizer.ns_steps)
        ours.mul_(1 - 0.01 * 0.1)
        ours.add_(direction.view(shape), alpha=-0.01 * muon.adjusted(optimizer, stored))
        theirs.step()  # type: ignore[no-untyped-call]
        assert torch.equal(ours, leaf)


@pytest.mark.parametrize("together", [EXPERTS_AT_ONCE, 2 * 24 * 16])
def test_each_expert_is_a_matrix(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """Its rows take turns with the others'; as alone, however many are made at once."""
    monkeypatch.setattr("bigplan.graph.muon.EXPERTS_AT_ONCE", together)
    rows = torch.randn(24, 5, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = muon.orthogonalised(rows.flatten(), Stored("e", 24, 5 * 16, experts=5), 5)
    for expert in range(5):
        alone = muon.newton_schulz(rows[:, expert].clone(), 5)
        apart = (found.view(24, 5, 16)[:, expert] - alone).float()
        assert float(apart.norm() / alone.float().norm()) < OFF


def test_singular_values_come_near_1() -> None:
    matrix = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(muon.newton_schulz(matrix.bfloat16(), 5).float())
    assert 0.5 < float(values.min()) < float(values.max()) < 1.4
    before = torch.linalg.svdvals(matrix)
    assert float(before.max() / before.min()) > 5


def _by_torch(plan: Plan, run: Run) -> Iterable[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]:
    """Each layer after each step, by name: the run's and what torch's optimizers make of it.

    The gradients are the plain loop's, of the run's weights before the step.
    """
    loop = loop_of(plan)
    leaves = [_leaves(loop, plan, layer) for layer in range(len(loop.state))]
    optimizers = [_optimizers(plan, layer, each) for layer, each in enumerate(leaves)]
    for before, after in zip(run.states[:-1], run.states[1:], strict=True):
        loop.state = before
        gradients, _, _ = loop._gradients()
        loop._steps += 1
        for layer, named in enumerate(leaves):
            parts = _split(plan, layer, gradients[layer])
            for name, old in _split(plan, layer, before[layer].weights).items():
                named[name].data.copy_(old)
                named[name].grad = parts[name].float()
            for optimizer in optimizers[layer]:
                optimizer.step()
            ours = _split(plan, layer, after[layer].weights)
            yield ours, {name: leaf.detach() for name, leaf in named.items()}


def _split(plan: Plan, layer: int, flat: Tensor) -> dict[str, Tensor]:
    parameters = plan.model.kinds()[plan.model.layer_sequence()[layer]]
    parts = torch.split(flat, [p.count for p in parameters])
    return {p.name: part.view(p.shape) for p, part in zip(parameters, parts, strict=True)}


def _leaves(loop: PlainLoop, plan: Plan, layer: int) -> dict[str, torch.nn.Parameter]:
    parts = _split(plan, layer, loop.state[layer].weights)
    return {name: torch.nn.Parameter(value.clone()) for name, value in parts.items()}


def _optimizers(
    plan: Plan, layer: int, leaves: Mapping[str, torch.nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """torch's Muon of matrices and AdamW of the rest, with each tensor's rate and decay."""
    optimizer, kind = plan.training.optimizer, plan.model.layer_sequence()[layer]
    rule = rules(optimizer, plan.model, layer)
    found: list[torch.optim.Optimizer] = []
    for parameter in plan.model.kinds()[kind]:
        own = rule[parameter.name]
        rate = optimizer.learning_rate * own.learning_rate_factor
        each = {"params": [leaves[parameter.name]], "lr": rate, "weight_decay": own.weight_decay}
        if orthogonalised(optimizer, kind, parameter):
            made: torch.optim.Optimizer = torch.optim.Muon(
                [each], momentum=optimizer.momentum, adjust_lr_fn=optimizer.adjust_lr_fn
            )
        else:
            betas = optimizer.beta1, optimizer.beta2
            made = torch.optim.AdamW([each], betas=betas, eps=optimizer.epsilon, fused=True)
        found.append(made)
    return found


@pytest.mark.parametrize("changes", [{}, {"name": "original"}])
@pytest.mark.parametrize("tier", [Tier.GPU, Tier.HOST])
def test_a_run_is_torchs_muon_and_adamw(changes: dict[str, str], tier: Tier) -> None:
    """In fp32 with the same gradients the products are the same: equal bits after every step."""
    optimizer = MUON.model_copy(update={"adjust_lr_fn": changes.get("name", MUON.adjust_lr_fn)})
    alike = {"precision": "fp32", "clip_norm": None, "optimizer": optimizer}
    plan = muon_plan(Strategy(dp=1), tier, changes=alike)
    matrices, run = 0, execute(plan)
    for ours, theirs in _by_torch(plan, run):
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name
            matrices += value.dim() == 2
    assert matrices == len(run.results) * (2 * 7 + 2)  # two blocks, embedding, head


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ({}, {"precision": "fp16"}),
        ({}, {"clip_norm": None}),
        (EXPERTS, {}),
    ],
)
def test_streamed_state_is_updated_as_on_the_gpu(
    model: dict[str, object], changes: dict[str, object]
) -> None:
    here, streamed = (
        execute(muon_plan(Strategy(dp=1), tier, model=model, changes=changes))
        for tier in (Tier.GPU, Tier.HOST)
    )
    assert here.losses == streamed.losses
    assert here.losses[-1] != here.losses[0]
    for one, other in zip(here.states, streamed.states, strict=True):
        same("streamed", one, other)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Losses of every layout whose ranks went on from one rank's checkpoint."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, model in (("one", {}), ("experts", EXPERTS)):
        course(muon_plan(Strategy(dp=1), model=model), AT, at=AT, folder=folder / name)
    losses: dict[str, list[float]] = {}
    for run, count in ((run_two, 2), (run_four, 4)):
        start(run, folder, count)
        files = [folder / f"losses.{count}.{rank}" for rank in range(count)]
        first, *others = (pickle.loads(file.read_bytes()) for file in files)
        assert all(other == first for other in others)
        losses |= first
    return folder, losses


@cache
def _alone(*, experts: bool) -> list[float]:
    return course(muon_plan(Strategy(dp=1), model=EXPERTS if experts else {}), STEPS + 1).losses


@pytest.mark.parametrize("layout", [*LAYOUTS, *WITH_EXPERTS])
def test_ranks_go_on_as_one_and_one_from_theirs(
    ranks: tuple[Path, dict[str, list[float]]], layout: str
) -> None:
    folder, losses = ranks
    _, model = layout_of(layout)
    alone = _alone(experts=bool(model))
    first = STEPS - len(losses[layout])
    assert first >= 1
    assert losses[layout] == pytest.approx(alone[first:STEPS], rel=NEAR)
    found = latest(folder / layout)
    assert found is not None
    back = course(muon_plan(Strategy(dp=1), Tier.HOST, model=model), STEPS + 1, found.path)
    assert len(back.losses) >= 1
    assert back.losses == pytest.approx(alone[back.first :], rel=NEAR)


@pytest.mark.parametrize("there", [Tier.GPU, Tier.HOST])
@pytest.mark.parametrize("model", [{}, EXPERTS])
def test_a_run_goes_on_with_the_same_bits(
    there: Tier, model: dict[str, object], tmp_path: Path
) -> None:
    whole = course(muon_plan(Strategy(dp=1), there, model=model), STEPS, at=AT, folder=tmp_path)
    found = latest(tmp_path)
    assert found is not None
    rest = course(muon_plan(Strategy(dp=1), model=model), STEPS, found.path)
    same("as it was written", whole.written, rest.begun)
    assert rest.losses == whole.losses[rest.first :]


@pytest.mark.gpu
@pytest.mark.parametrize("tier", [Tier.GPU, Tier.HOST])
@pytest.mark.parametrize("model", [{}, EXPERTS])
def test_a_gpu_trains_as_a_cpu_does(tier: Tier, model: dict[str, object]) -> None:
    """Losses: directions are off by bf16's roundings, whose order of adding differs."""
    ours = course(muon_plan(Strategy(dp=1), tier, "cuda", model=model), 8).losses
    theirs = course(muon_plan(Strategy(dp=1), tier, model=model), 8).losses
    assert ours == pytest.approx(theirs, rel=0.01)
    assert ours[-1] < ours[0]
