"""Time rows of a pipeline with virtual stages: single micro-batches, chunks of layers in turn.

There are M micro-batches. F and B are the times of a stage's chunks together on one of them. Hops
lead through the first chunks of the stages before it. They include what the first stage gathers
before its first forward and reduces after its last backward (`ends.py`):

    step  >= hops + M (F + B) + hops back
    step  >= update, and every move it needs, + M B + hops back   (where updates wait for the norm)
    step  >= first micro-batch through all chunks and back to this stage + M B
             + forward passes that come after the first backward pass + hops back
    step  >= the same until the last micro-batch's first backward on this stage, then that
             micro-batch's way back through all chunks, with the recomputation on its way from the
             last stage
    step  >= everything one lane does in a step

Micro-batches take a chunk in rounds of as many as there are stages. So the first one cannot enter a
stage's next chunk before so many have passed the chunk before. On its way back the last one is the
last of a round in every chunk. Parameters, gradients and activations stay on the GPU, so passes
wait for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.cost import Costs
from bigplan.graph.graph import Graph
from bigplan.solve.ends import leading_seconds, trailing_seconds
from bigplan.solve.linear import AtLeast, total
from bigplan.solve.stage_times import StageTimes
from bigplan.solve.update_times import late_seconds, update_seconds


def interleaved_rows(every: list[StageTimes]) -> Iterator[AtLeast]:
    """All time rows of the pipeline."""
    graph, costs = every[0].stage.graph, every[0].costs
    forward, backward = _chunk_seconds(graph, costs)
    through = _through(graph, forward, leading_seconds(every[0]), costs.send)
    ends = trailing_seconds(every[0])
    before = after = 0.0  # hops through the stages before, and back
    for times in every:
        stages, stage = len(times.stage.stages), times.stage.stages[-1]
        hop, back = (seconds + costs.send for seconds in opening_seconds(times))
        before = max(before, leading_seconds(times)) + (stages - 1) * hop
        after = max(after, trailing_seconds(times)) + (stages - 1) * back
        forwards = times.units * times.forward_compute
        backwards = times.units * times.backward_compute
        yield AtLeast("step", before + forwards + backwards + after)
        later = backward[len(backward) - graph.strategy.pp + stage + 1 :]
        turned = through + sum(later) + len(later) * costs.send
        turned += forwards - _begun(graph, forward, stage)
        yield AtLeast("step", turned + backwards + after)
        # The last round passes the stage for the last time, or its last micro-batch does.
        rounds = turned + (times.units - graph.strategy.pp) * times.backward_compute
        passed = graph.strategy.pp * backward[stage - graph.strategy.pp]
        passed += _drain(graph, backward, stage, costs.send)
        yield AtLeast("step", rounds + passed + ends)
        if times is every[-1]:
            others = (graph.strategy.pp - 1) * backward[-1] + (len(forward) - 1) * costs.send
            own = total([len(t.stage.stages) * t.backward_compute for t in every])
            yield AtLeast("step", rounds + own + others + ends)
        if graph.deferred:
            for lane, seconds in update_seconds(times, list(times.stage.kinds)):
                if lane != "write":  # what was updated last may be written while the step goes on
                    yield AtLeast("step", seconds - late_seconds(times, lane) + backwards + after)
        before += hop
        after += back


def opening_seconds(times: StageTimes) -> tuple[float, float]:
    """Seconds of a stage's first chunk forward, and backward without recomputation."""
    prices = [(times.costs.kinds[name], count) for name, count in times.stage.opening]
    return sum(n * p.forward for p, n in prices), sum(n * p.backward for p, n in prices)


def _chunk_seconds(graph: Graph, costs: Costs) -> tuple[list[float], list[float]]:
    """Seconds of every chunk, first to last, on a micro-batch: forward, and backward.

    Without recomputation. The loss is all forward.
    """
    forward, backward = list[float](), list[float]()
    for chunk in range(graph.strategy.pp * graph.strategy.vpp):
        prices = [(costs.kinds[graph.layers[i]], i) for i in graph.chunk_layers(chunk)]
        own = sum(p.backward for p, i in prices if i < len(graph.layers) - 1)
        loss = sum(p.backward for p, _ in prices) - own
        forward.append(sum(p.forward for p, _ in prices) + loss)
        backward.append(own)
    return forward, backward


def _through(graph: Graph, forward: list[float], leading: float, send: float) -> float:
    """Seconds until the first micro-batch has passed all chunks forward."""
    stages, ends = graph.strategy.pp, list[float]()
    for chunk, seconds in enumerate(forward):
        begin = ends[-1] + send if ends else leading
        if (before := chunk - stages) >= 0:
            begin = max(begin, ends[before] + (stages - 1) * forward[before])
        ends.append(begin + seconds)
    return ends[-1]


def _begun(graph: Graph, forward: list[float], stage: int) -> float:
    """Seconds of the stage's forward passes before its first backward."""
    stages, passes, seconds = graph.strategy.pp, graph.warm_up(stage) + 1, 0.0
    groups, rest = divmod(passes, len(forward))
    for turn, chunk in enumerate(graph.stage_chunks(stage)):
        often = min(max(rest - turn * stages, 0), stages)
        seconds += (groups * stages + often) * forward[chunk]
    return seconds


def _drain(graph: Graph, backward: list[float], stage: int, send: float) -> float:
    """Seconds from the last micro-batch's first backward on the stage until its very last."""
    *_, last = graph.stage_chunks(stage)
    stages, ends = graph.strategy.pp, {last: 0.0}
    for chunk in reversed(range(last)):
        begin = ends[chunk + 1] + send
        if (before := chunk + stages) in ends:
            begin = max(begin, ends[before] + (stages - 1) * backward[chunk])
        ends[chunk] = begin + backward[chunk]
    return ends[0]
