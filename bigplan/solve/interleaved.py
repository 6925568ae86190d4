"""Time rows of a pipeline with virtual stages: single micro-batches, chunks of layers in turn.

With M micro-batches, F and B the times of a stage's chunks together on one micro-batch, and the
hops through the first chunks of the stages before it:

    step  >= hops + M (F + B) + hops back
    step  >= update, and every move it needs, + M B + hops back   (where updates wait for the norm)
    step  >= first micro-batch through all chunks and back to this stage + M B
             + forward passes that come after the first backward pass + hops back
    step  >= everything one lane does in a step

Parameters, gradients and activations stay on the GPU, so passes wait for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.graph.graph import Graph
from bigplan.solve.linear import AtLeast, Linear, total
from bigplan.solve.stage_times import StageTimes
from bigplan.solve.update_times import gpu_seconds, late_seconds, update_seconds


def interleaved_rows(every: list[StageTimes]) -> Iterator[AtLeast]:
    """All time rows of the pipeline."""
    forward = backward = 0.0  # hops of the stages before
    for times in every:
        hop, back = opening_seconds(times)
        stages = len(times.stage.stages)
        before = forward + (stages - 1) * (hop + times.costs.send)
        after = backward + (stages - 1) * (back + times.costs.send)
        yield from _step_rows(times, before, after)
        yield AtLeast("step", _after_first_backward(times, every) + after)
        forward += stages * (hop + times.costs.send)
        backward += stages * (back + times.costs.send)


def opening_seconds(times: StageTimes) -> tuple[float, float]:
    """Seconds of a stage's first chunk forward, and backward without recomputation."""
    prices = [(times.costs.kinds[name], count) for name, count in times.stage.opening]
    return sum(n * p.forward for p, n in prices), sum(n * p.backward for p, n in prices)


def _step_rows(times: StageTimes, before: float, after: float) -> Iterator[AtLeast]:
    units, backward = times.units, times.units * times.backward_compute
    compute = units * times.forward_compute + backward
    yield AtLeast("step", before + compute + after)
    last = sum(n * _longest(times, name) for name, n in times.stage.opening)
    reduces = sum(n * times.costs.kinds[name].reduce for name, n in times.stage.opening)
    if times.stage.graph.strategy.dp > 1:
        yield AtLeast("step", before + compute + (reduces - last))
    if times.stage.graph.deferred:
        yield AtLeast("step", gpu_seconds(times) + compute + after)
        for lane, seconds in update_seconds(times, list(times.stage.kinds)):
            if lane != "write":  # what was updated last may be written while the step goes on
                yield AtLeast("step", seconds - late_seconds(times, lane) + backward + after)


def _longest(times: StageTimes, name: str) -> float:
    cost = times.costs.kinds[name]
    return cost.backward + max(cost.again(r) for r in times.stage.graph.recomputes)


def _after_first_backward(times: StageTimes, every: list[StageTimes]) -> Linear:
    """Seconds until the class's last stage may begin its first backward, and of work after it."""
    graph, stage = times.stage.graph, times.stage.stages[-1]
    stages, turns = graph.strategy.pp, graph.strategy.vpp
    through = sum(len(t.stage.stages) * t.forward_compute for t in every)
    turned = [_chunk_seconds(every[-1], graph, s)[1] for s in range(stage + 1, stages)]
    hops = (stages * turns - 1 + stages - 1 - stage) * times.costs.send
    done = 0.0
    passes = graph.warm_up(stage) + 1
    for turn in range(turns):
        groups, rest = divmod(passes, stages * turns)
        often = groups * stages + min(max(rest - turn * stages, 0), stages)
        done += often * _chunk_seconds(times, graph, stage, turn)[0]
    work = times.units * times.forward_compute - done
    constant = through + sum(turned) + hops + work
    return total([Linear(constant=constant), times.units * times.backward_compute])


def _chunk_seconds(
    times: StageTimes, graph: Graph, stage: int, turn: int = -1
) -> tuple[float, float]:
    """Seconds of a chunk forward, the loss's backward included, and backward without it."""
    layers = graph.chunk_layers(graph.stage_chunks(stage)[turn])
    prices = [(times.costs.kinds[graph.layers[i]], i == len(graph.layers) - 1) for i in layers]
    forward = sum(p.forward + (p.backward if loss else 0.0) for p, loss in prices)
    return forward, sum(p.backward for p, loss in prices if not loss)
