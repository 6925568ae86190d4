"""Time rows of a pipeline with virtual stages: single micro-batches, chunks of layers in turn.

There are M micro-batches and S stages. F and B are the times of a stage's chunks together on one
micro-batch. Hops lead through the first chunks of the stages before it. They include what the first
stage gathers before its first forward and reduces after its last backward (`ends.py`):

    step  >= hops + M (F + B) + hops back
    step  >= update, and every move it needs, + M B + hops back   (where updates wait for the norm)
    step  >= first micro-batch through all chunks and back to this stage + M B
             + forward passes that come after the first backward pass + hops back
    step  >= the same until the last micro-batch's first backward on this stage, then that
             micro-batch's way back through all chunks
    step  >= everything one lane does in a step

Micro-batches take a chunk in rounds of S. So the first one cannot enter a stage's next chunk before
S have passed the chunk before. On its way back the last one is the last of S in every chunk.
Parameters, gradients and activations stay on the GPU, so passes wait for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigplan.graph.graph import Graph
from bigplan.solve.ends import leading_seconds, trailing_seconds
from bigplan.solve.linear import AtLeast, Linear, total
from bigplan.solve.stage_times import StageTimes
from bigplan.solve.update_times import gpu_seconds, late_seconds, update_seconds


def interleaved_rows(every: list[StageTimes]) -> Iterator[AtLeast]:
    """All time rows of the pipeline."""
    chunks = _Chunks.of(every)
    forward = backward = 0.0  # hops of the stages before
    for times in every:
        hop, back = opening_seconds(times)
        stages = len(times.stage.stages)
        forward = max(forward, leading_seconds(times))
        backward = max(backward, trailing_seconds(times))
        before = forward + (stages - 1) * (hop + times.costs.send)
        after = backward + (stages - 1) * (back + times.costs.send)
        yield from _step_rows(times, before, after)
        for seconds in chunks.after_first_backward(times, after):
            yield AtLeast("step", seconds)
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
    if times.stage.graph.deferred:
        yield AtLeast("step", gpu_seconds(times) + compute + after)
        for lane, seconds in update_seconds(times, list(times.stage.kinds)):
            if lane != "write":  # what was updated last may be written while the step goes on
                yield AtLeast("step", seconds - late_seconds(times, lane) + backward + after)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Seconds of every chunk on a micro-batch, first chunk to last; the loss is all forward."""

    every: list[StageTimes]
    forward: list[float]
    backward: list[float]  # without recomputation

    @classmethod
    def of(cls, every: list[StageTimes]) -> _Chunks:
        """The chunks of all stages."""
        graph, costs = every[0].stage.graph, every[0].costs
        forward, backward = list[float](), list[float]()
        for chunk in range(graph.strategy.pp * graph.strategy.vpp):
            prices = [(costs.kinds[graph.layers[i]], i) for i in graph.chunk_layers(chunk)]
            own = sum(p.backward for p, i in prices if i < len(graph.layers) - 1)
            loss = sum(p.backward for p, _ in prices) - own
            forward.append(sum(p.forward for p, _ in prices) + loss)
            backward.append(own)
        return cls(every, forward, backward)

    @property
    def graph(self) -> Graph:
        """The pipeline's step."""
        return self.every[0].stage.graph

    @property
    def send(self) -> float:
        """Seconds of a message."""
        return self.every[0].costs.send

    @property
    def stages(self) -> int:
        """Stages of the pipeline, and micro-batches that take a chunk one after the other."""
        return self.graph.strategy.pp

    def after_first_backward(self, times: StageTimes, after: float) -> Iterator[Linear]:
        """Steps as the class's last stage sees them from its first backward on.

        `after`: seconds from its last backward to the end of the step.
        """
        stage, units = times.stage.stages[-1], times.units
        begun = self._through() + self._turned(stage) - self._begun(stage)
        begun += units * times.forward_compute
        yield begun + units * times.backward_compute + after
        # The last S micro-batches pass the stage for the last time, or the very last one does.
        rounds = (units - self.stages) * times.backward_compute
        end = self._drain(stage) + trailing_seconds(self.every[0])
        yield begun + rounds + self.stages * self.backward[stage - self.stages] + end
        yield self._drained(times, after)
        if times is self.every[-1]:
            passed = [len(t.stage.stages) * t.backward_compute for t in self.every]
            messages = (len(self.forward) - 1) * self.send
            others = (self.stages - 1) * self.backward[-1]
            end = messages + others + trailing_seconds(self.every[0])
            yield begun + rounds + total(passed) + end

    def _drained(self, times: StageTimes, after: float) -> Linear:
        """The last stage works until the last S micro-batches come back; then the class does.

        Of each of these the class's stage still has all backward passes to do.
        """
        last = self.every[-1]
        forwards = last.units * last.forward_compute - (self.stages - 1) * self.forward[-1]
        begun = self._through() - self._begun(self.stages - 1) + forwards
        rounds = (last.units - self.stages) * last.backward_compute
        end = self._turned(times.stage.stages[-1]) + after
        return begun + rounds + self.stages * times.backward_compute + end

    def _through(self) -> float:
        """Seconds until the first micro-batch has passed all chunks forward."""
        ends = list[float]()
        for chunk, seconds in enumerate(self.forward):
            begin = ends[-1] + self.send if ends else leading_seconds(self.every[0])
            if (before := chunk - self.stages) >= 0:
                begin = max(begin, ends[before] + (self.stages - 1) * self.forward[before])
            ends.append(begin + seconds)
        return ends[-1]

    def _turned(self, stage: int) -> float:
        """Seconds from the end of the forward on until a micro-batch comes back to the stage."""
        later = self.backward[len(self.backward) - self.stages + stage + 1 :]
        return sum(later) + len(later) * self.send

    def _begun(self, stage: int) -> float:
        """Seconds of the stage's forward passes before its first backward."""
        passes, seconds = self.graph.warm_up(stage) + 1, 0.0
        groups, rest = divmod(passes, len(self.forward))
        for turn, chunk in enumerate(self.graph.stage_chunks(stage)):
            often = min(max(rest - turn * self.stages, 0), self.stages)
            seconds += (groups * self.stages + often) * self.forward[chunk]
        return seconds

    def _drain(self, stage: int) -> float:
        """Seconds from the last micro-batch's first backward on the stage until its very last."""
        *_, last = self.graph.stage_chunks(stage)
        ends = {last: 0.0}
        for chunk in reversed(range(last)):
            begin = ends[chunk + 1] + self.send
            if (before := chunk + self.stages) in ends:
                begin = max(begin, ends[before] + (self.stages - 1) * self.backward[chunk])
            ends[chunk] = begin + self.backward[chunk]
        return ends[0]
