"""Runs a plan through Worker and looks at its state between steps."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigplan.content import Content, Holds
from bigplan.layer_placement import LayerPlacement, stage_table
from bigplan.plan import Plan, graph_of
from bigplan.runtime.context import Context
from bigplan.runtime.execution.forwards import Part
from bigplan.runtime.layers.preference import Scored
from bigplan.runtime.memory.moments import StoredState, bytes_view, decoded, of_elements
from bigplan.runtime.result import Finished, StepResult
from bigplan.runtime.weights.homes import load
from bigplan.runtime.worker import NativeWorker
from bigplan.timeline import Timeline
from tests.runtime.reference import UNIT, LayerState, Outcome, PlainLoop, State

STEPS = 3
# Of steps that ranks hand over: no test that compares them reads events, of which they have many.
NO_TIMES = Timeline((), 0.0)


def steps_of(plan: Plan) -> int:
    """How many show what a plan computes.

    The second one begins from moments, buffers and tiers that the first has left, as all later ones
    do. In fp16 steps are skipped first; CUDA graphs are made in the second and used in the third.
    """
    long = plan.training.precision == "fp16" or plan.cluster.group.gpu.device != "cpu"
    return STEPS if long else STEPS - 1


@dataclass(frozen=True, slots=True)
class Run:
    """What a rank computed: the state before the first step and after every update."""

    results: tuple[StepResult, ...]
    states: tuple[State, ...]
    finished: Finished
    graphs: int  # passes that the rank repeated from CUDA graphs in the end
    validated: float | None = None  # the validation's loss of the first weights, if asked for

    @property
    def losses(self) -> list[float]:
        """Of every step."""
        return [result.loss for result in self.results]


def take_gpu(rank: int) -> None:
    """Of the GPUs that this process sees, put the one of its rank first, before CUDA starts."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = seen.split(",") if seen else [str(gpu) for gpu in range(torch.cuda.device_count())]
    own = every.pop(rank)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join((own, *every))


@contextmanager
def started(
    plan: Plan,
    *,
    rank: int = 0,
    meeting: Path = Path(),
    poison: bool = True,
    backend: str | None = None,
) -> Iterator[NativeWorker]:
    """A worker ready for its first step."""
    with tempfile.TemporaryDirectory() as scratch:
        worker = NativeWorker(plan, rank, Path(scratch), poison=poison, backend=backend)
        try:
            worker.preflight()
            worker.start(meeting)
            yield worker
        finally:
            worker.close()


def execute(
    plan: Plan,
    *,
    rank: int = 0,
    meeting: Path = Path(),
    steps: int | None = None,
    backend: str | None = None,
    validates: bool = False,
    looks: bool = True,
) -> Run:
    """So many steps, or as many as the plan needs (steps_of); freed slots filled with NaN.

    `looks`: at the state, before the first step and after each, which takes a quarter of the time.
    """
    with started(plan, rank=rank, meeting=meeting, backend=backend) as worker:
        if (wanted := plan.training.preference) is not None and wanted.refers:
            worker.refer(references_of(worker))
        validated = worker.evaluate() if validates else None
        states = [state_of(worker)] if looks else []
        results = []
        for _ in range(steps or steps_of(plan)):
            results.append(replace(worker.step(), timeline=NO_TIMES))
            states += [state_of(worker)] if looks else []
        graphs = len(worker._running().executor._graphs._passes)
        finished = worker.finish()
        if plan.training.deferred_updates and looks:
            # Updates wait for the next step: after the first nothing has changed yet.
            for old, new in zip(*states[:2], strict=True):
                assert torch.equal(old.weights.nan_to_num(), new.weights.nan_to_num())
            states = [*states[1:], state_of(worker)]
        return Run(tuple(results), tuple(states), finished, graphs, validated)


def references_of(worker: NativeWorker) -> dict[Part, NDArray[np.float64]]:
    """Log-probabilities of pairs under the weights as they are, as the launcher collects them."""
    found: dict[Part, NDArray[np.float64]] = {}
    for part, data in worker.pair_data().items():
        found[part] = np.full((data.pairs, 2), np.nan)
        for step in range(data.steps):
            mine = pickle.dumps(worker.score(part, step))
            for theirs in context_of(worker).groups.texts_of_all(mine):
                scored: Scored = pickle.loads(theirs)
                assert np.isnan(found[part][scored.pairs]).all(), "a pair was scored twice"
                found[part][scored.pairs] = scored.values
        assert not np.isnan(found[part][: data.wanted]).any(), "a pair was not scored"
    return found


def evaluated(plan: Plan) -> float:
    """The validation's loss of the first weights, by one rank."""
    with started(plan) as worker:
        return worker.evaluate()


def context_of(worker: NativeWorker) -> Context:
    """The started worker's shapes and memory."""
    return worker._running().context


def state_of(worker: NativeWorker) -> State:
    """Weights and moments, wherever they live; NaN where another rank has them."""
    context = context_of(worker)
    return _state(context, {layer: weights.clone() for layer, weights in worker.weights()})


def own_state(context: Context) -> State:
    """The same without asking other ranks: NaN for parameters, too, where one has them alone."""
    found = {}
    for layer in context.program.layers:
        held, dtype = context.entries.held(layer), context.parameter_dtype
        home = load(context, Content(Holds.PARAMETERS, layer))
        weights = torch.full((context.kind(layer).parameters,), torch.nan, dtype=dtype)
        for at, elements in held:
            place = slice(at * dtype.itemsize, (at + len(elements)) * dtype.itemsize)
            weights[elements.start : elements.stop] = home[place].view(dtype)
        found[layer] = weights
    return _state(context, found)


def _state(context: Context, weights: Mapping[int, Tensor]) -> State:
    return tuple(
        _layer_state(context, layer, weights[layer])
        if layer in weights
        else _missing(context, layer)
        for layer in range(len(context.graph.layers))
    )


def _missing(context: Context, layer: int) -> LayerState:
    """Of a layer on another stage."""
    elements = sum(p.count for p in context.parameters(layer))
    nothing = torch.full((elements,), torch.nan)
    return LayerState(nothing, (nothing,) * context.training.optimizer.kept)


def _layer_state(context: Context, layer: int, weights: Tensor) -> LayerState:
    """NaN where another rank has the state."""
    optimizer, master = context.training.optimizer, context.graph.sizes.master
    parts = optimizer.kept + master
    whole = torch.full((parts, weights.numel()), torch.nan)
    for share, number, boxes in context.rows[layer].state:
        elements = sum(box.count for box in boxes)
        if elements and parts:
            home = load(context, Content(Holds.STATE, layer, share, number))
            state = context.state_of(layer, bytes_view(home), elements)
            # Of Muon's state first moments are compared; only some elements have second ones.
            state = state._replace(moments=state.moments[: optimizer.kept])
            for kind, values in enumerate(_values(state)):
                for box in boxes:
                    whole[kind, box.in_layer] = values[box.in_piece]
    if master:
        mine = ~whole[-1].isnan() if context.graph.strategy.zero else slice(None)
        cast = whole[-1].to(weights.dtype)
        assert torch.equal(weights[mine], cast[mine]), "weights and master copy differ"
    moments = optimizer.kept
    rows = context.rows[layer]
    for filling in (part for own in rows.part.ranges for part in rows.filling(own.tensors)):
        for values in (weights, *whole):
            assert not values[filling.start : filling.stop].any(), "filling is not zero"
    weights = _in_model(context, layer, whole[-1] if master else weights)
    return LayerState(weights, tuple(_in_model(context, layer, each) for each in whole[:moments]))


def _values(state: StoredState) -> list[Tensor]:
    """Moments and the master copy in fp32."""
    moments = [moment.float() for moment in state.moments]
    if state.scales:
        each = [of_elements(scales, len(moments[0])) for scales in state.scales]
        first, root = map(decoded, state.moments, each)
        moments = [first, root * root]
    return moments if state.master is None else [*moments, state.master]


def _in_model(context: Context, layer: int, mine: Tensor) -> Tensor:
    """Values of the layer's elements on this rank, as the whole layer has them; NaN elsewhere."""
    rows, found = context.rows[layer], []
    for parameter in context.parameters(layer):
        values = torch.full(parameter.matrix, torch.nan, dtype=mine.dtype)
        if (held := rows.held[parameter.name]) is not None:
            first = rows.element(held)
            values[held.in_matrix] = mine[first : first + held.elements].view(held.rows, -1)
        found.append(values.flatten())
    return torch.cat([mine[:0], *found])  # a tied head without weights has none


def together(runs: Sequence[Run]) -> Run:
    """What the ranks computed as one: each has the state that it owns."""
    states = tuple(
        tuple(joined(layers) for layers in zip(*each, strict=True))
        for each in zip(*(run.states for run in runs), strict=True)
    )
    return replace(runs[0], states=states)


def joined(layers: Sequence[LayerState]) -> LayerState:
    """Every element once, from the rank that has it; those that several have are the same."""
    joined = layers[0].clone()
    for other in layers[1:]:
        for mine, theirs in zip(joined.tensors().values(), other.tensors().values(), strict=True):
            both = ~mine.isnan() & ~theirs.isnan()
            assert torch.equal(mine[both], theirs[both])
            mine.copy_(torch.where(mine.isnan(), theirs, mine))
    return joined


def loop_of(plan: Plan) -> PlainLoop:
    """The plain loop that does the plan's work."""
    graph, layers = graph_of(plan), dict[int, LayerPlacement]()
    for stage in range(plan.strategy.pp):
        layers |= stage_table(graph, plan.placement, stage)
    return PlainLoop(plan, layers)


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
        if plan.strategy.tp * plan.strategy.cp > 1:
            assert result.loss == pytest.approx(outcome.loss, rel=loop.rounding)
        elif plan.strategy.dp <= 2:
            assert result.loss == outcome.loss
        else:  # in another order of the ranks' parts
            assert result.loss == pytest.approx(outcome.loss, rel=plan.strategy.dp * UNIT)
        same_report(plan, result, outcome)
        for layer, bound in enumerate(outcome.bounds):
            ours, plain = after[layer], outcome.state[layer]
            label = f"step {result.step}, layer {layer}"
            if bound is None:
                exact += 1
                same(label, (plain,), (ours,))
                continue
            expected = plain.tensors()
            for name, tensor in ours.tensors().items():
                difference = (tensor.double() - expected[name].double()).abs()
                over = difference - bound.tensors()[name]
                assert bool((over <= 0).all()), f"{label}: {name} is off by {float(over.max())}"
    return exact


def same_report(plan: Plan, result: StepResult, outcome: Outcome) -> None:
    """Rate, norm, scale and skip of a step are the plain loop's."""
    training = plan.training
    assert result.learning_rate == outcome.learning_rate
    assert result.skipped == (training.deferred_updates and outcome.gradient_norm is None)
    assert result.loss_scale == (outcome.loss_scale if training.precision == "fp16" else None)
    norm = outcome.gradient_norm if training.deferred_updates else None
    within = None if norm is None else pytest.approx(norm, rel=outcome.norm_error)
    assert result.gradient_norm == within


def same(label: str, expected: State, actual: State) -> None:
    """Equal bits."""
    for old, new in zip(expected, actual, strict=True):
        for name, one in old.tensors().items():
            two = new.tensors()[name]
            assert torch.equal(one, two), f"{label}: {name} differs by {(one - two).abs().max()}"
