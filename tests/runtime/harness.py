"""Runs a plan through Worker and looks at its state between steps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bigplan.graph.build import build_graph
from bigplan.placement import Tier, stage_table
from bigplan.plan import Plan
from bigplan.runtime.context import Context
from bigplan.runtime.result import Finished, StepResult
from bigplan.runtime.worker import Worker, load
from tests.runtime.reference import LayerState, PlainLoop, State

STEPS = 3


@dataclass(frozen=True, slots=True)
class Run:
    """What a rank computed: the state before the first step and after every update."""

    results: tuple[StepResult, ...]
    states: tuple[State, ...]
    finished: Finished

    @property
    def losses(self) -> list[float]:
        """Of every step."""
        return [result.loss for result in self.results]


@contextmanager
def started(
    plan: Plan, *, rank: int = 0, init_method: str = "", poison: bool = True
) -> Iterator[Worker]:
    """A worker ready for its first step."""
    with tempfile.TemporaryDirectory() as scratch:
        worker = Worker(plan, rank, plan.strategy.dp, Path(scratch), poison=poison)
        try:
            worker.preflight()
            worker.start(init_method)
            yield worker
        finally:
            worker.close()


def execute(plan: Plan, *, rank: int = 0, init_method: str = "", steps: int = STEPS) -> Run:
    """All steps, freed slots filled with NaN."""
    with started(plan, rank=rank, init_method=init_method) as worker:
        states = [state_of(worker)]
        results = []
        for _ in range(steps):
            results.append(worker.step())
            states.append(state_of(worker))
        finished = worker.finish()
        if plan.training.clip_norm is not None:
            # Updates wait for the next step: after the first nothing has changed yet.
            for old, new in zip(*states[:2], strict=True):
                assert torch.equal(old.weights, new.weights)
            states = [*states[1:], state_of(worker)]
        return Run(tuple(results), tuple(states), finished)


def context_of(worker: Worker) -> Context:
    """The started worker's shapes and memory."""
    return worker._running().context


def state_of(worker: Worker) -> State:
    """Weights and moments, wherever they live."""
    context = context_of(worker)
    return tuple(
        _layer_state(context, layer, weights.clone()) for layer, weights in worker.weights()
    )


def _layer_state(context: Context, layer: int, weights: Tensor) -> LayerState:
    parts = 3 if context.graph.sizes.master else 2
    whole = torch.full((parts, weights.numel()), torch.nan)
    rows = context.rows[layer]
    pieces = [(f"o{layer}.{tier}", 0, rows.pieces[tier]) for tier in (Tier.GPU, Tier.HOST)]
    pieces += [(f"o{layer}.{Tier.NVME}", i, boxes) for i, boxes in enumerate(rows.chunks)]
    for name, number, boxes in pieces:
        elements = sum(box.count for box in boxes)
        if elements:
            flat = load(context, name, number)[: 4 * parts * elements].view(torch.float32)
            for box in boxes:
                whole[:, box.in_layer] = flat.view(parts, elements)[:, box.in_piece]
    if parts == 3:
        assert torch.equal(weights, whole[2].to(weights.dtype)), "weights and master copy differ"
    return LayerState(whole[2] if parts == 3 else weights, whole[0], whole[1])


def loop_of(plan: Plan) -> PlainLoop:
    """The plain loop that does the plan's work."""
    graph = build_graph(plan.model, plan.training, plan.strategy)
    return PlainLoop(plan, stage_table(graph, plan.placement, 0))


def check(plan: Plan, run: Run) -> int:
    """Compare a run with the plain loop; how many layer-steps had to be equal bit by bit.

    Every step is compared from the run's own state before it, so no step hides behind the
    differences of those before. Where all are equal this is one loop from first to last.
    """
    loop, exact = loop_of(plan), 0
    same("first state", loop.state, run.states[0])
    for result, before, after in zip(run.results, run.states[:-1], run.states[1:], strict=True):
        loop.state = before
        outcome = loop.step()
        assert result.loss == outcome.loss
        for layer, bound in enumerate(outcome.bounds):
            ours, plain = after[layer], outcome.state[layer]
            label = f"step {result.step}, layer {layer}"
            if bound is None:
                exact += 1
                same(label, (plain,), (ours,))
                continue
            for name in ("weights", "exp_avg", "exp_avg_sq"):
                difference = (getattr(ours, name).double() - getattr(plain, name).double()).abs()
                over = difference - getattr(bound, name)
                assert bool((over <= 0).all()), f"{label}: {name} is off by {float(over.max())}"
    return exact


def same(label: str, expected: State, actual: State) -> None:
    """Equal bits."""
    for old, new in zip(expected, actual, strict=True):
        for name in ("weights", "exp_avg", "exp_avg_sq"):
            one, two = getattr(old, name), getattr(new, name)
            assert torch.equal(one, two), f"{label}: {name} differs by {(one - two).abs().max()}"
