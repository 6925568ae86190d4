"""Seconds of the update by lane: of the GPU's, the CPU's and the drives' work, and of every move.

Gradients and parameters of streamed state move, too, unless they live on the GPU. That depends on
two decisions at once, which no row can multiply. So there are two rows. The first counts as if all
of them lived on the GPU. The second counts the streamed elements beyond the number that can live
there. Both are below what the program moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bigplan.graph.graph import LayerKind
from bigplan.lower.entries import staged_chunk_bytes, streaming_bytes, streaming_entries
from bigplan.mechanics import CHUNK_STAGING, STAGING
from bigplan.placement import CHUNK, Tier
from bigplan.solve.linear import Linear, total
from bigplan.solve.memory import gradient_bytes, owned, weight_bytes
from bigplan.solve.stage import AWAY
from bigplan.solve.stage_times import NOTHING, Kinds, StageTimes


def update_seconds(
    times: StageTimes, kinds: Kinds, *, least: bool = False
) -> Iterator[tuple[str, Linear]]:
    """Lower bounds of seconds by lane; copies have two unless `least` asks for one.

    Of adapters nothing: they stay on the GPU, which updates them between its passes (ends.py).
    """
    kinds = [(kind, count) for kind, count in kinds if not kind.frozen]
    stage, rates, sizes = times.stage, times.costs.rates, times.stage.graph.sizes
    streamed = _elements(times, kinds, stage.streamed)
    second = _second_bytes(times, kinds, stage.streamed)
    back, out = (_cpu_rows_on_gpu(times, kinds, side) for side in ("parameters", "gradients"))
    old = 0 if sizes.master else sizes.parameter
    into = (sizes.parameter / rates.h2d) * back + (sizes.stored / rates.state_in) * streamed
    into = into + (1 / rates.state_in) * second
    off = (1 / rates.d2h) * (sizes.gradient * out + old * back)
    off = off + (sizes.stored / rates.state_out) * streamed + (1 / rates.state_out) * second
    yield "cpu", (1 / rates.cpu_update) * (_rows(times, kinds, AWAY) - streamed)
    beside = [(kind, count) for kind, count in kinds if not kind.orthogonalised]
    yield "gpu update", (1 / rates.gpu_update) * _elements(times, beside, stage.streamed)
    yield "h2d", into
    yield "d2h", off
    if streamed.terms and not least:
        # What is streamed, less what it can be on the GPU: in host memory, at least.
        brought = -1.0 * (sizes.gradient * out + old * back)
        yield "h2d", into + (1 / rates.state_in) * brought
        yield "d2h", off + -(sizes.parameter / rates.state_out) * back
    weights, gradients_on_disk = (
        total([nbytes(stage, k) * stage.tensor(k, tensor, Tier.NVME) for k, _ in kinds])
        for nbytes, tensor in ((weight_bytes, "parameters"), (gradient_bytes, "gradients"))
    )
    on_drives = _second_bytes(times, kinds, lambda k: stage.tensor(k, "optimizer", Tier.NVME))
    chunks = sizes.stored * _rows(times, kinds, (Tier.NVME,)) + on_drives
    old_on_disk = NOTHING if sizes.master else weights
    yield "read", (1 / rates.nvme_read) * (chunks + gradients_on_disk + old_on_disk)
    yield "write", (1 / rates.nvme_write) * (chunks + weights)


def _rows(times: StageTimes, kinds: Kinds, tiers: tuple[Tier, ...]) -> Linear:
    """Elements updated from state on `tiers`."""
    tensor = times.stage.tensor
    return _elements(times, kinds, lambda k: total([tensor(k, "optimizer", t) for t in tiers]))


def _cpu_rows_on_gpu(times: StageTimes, kinds: Kinds, side: str) -> Linear:
    """Elements that the CPU updates though their parameters, or gradients, live on the GPU.

    A lower bound, because the streamed elements may be others. Below zero, it is so many streamed
    elements, at least, that live in host memory.
    """
    stage = times.stage
    return _elements(times, kinds, lambda k: stage.others_on_gpu(k, side) - stage.streamed(k))


def _elements(times: StageTimes, kinds: Kinds, layers: Callable[[LayerKind], Linear]) -> Linear:
    """Elements that a rank updates of so many layers of each kind."""
    return total([owned(times.stage, k) * layers(k) for k, _ in kinds])


def _second_bytes(times: StageTimes, kinds: Kinds, layers: Callable[[LayerKind], Linear]) -> Linear:
    """Bytes of second moments that only elements have which Muon leaves to AdamW."""
    second = times.stage.graph.sizes.second
    if not second:
        return NOTHING
    each = {k.name: second * min(owned(times.stage, k), k.others) for k, _ in kinds}
    return total([each[k.name] * layers(k) for k, _ in kinds])


def gpu_seconds(times: StageTimes) -> Linear:
    """Seconds of the update that the GPU's compute waits for; of Muon's layers all wait."""
    stage, rate = times.stage, times.costs.rates.gpu_update
    rows = _rows(times, [(k, n) for k, n in stage.kinds if not k.orthogonalised], (Tier.GPU,))
    by_muon = sum(
        n * (owned(stage, k) / rate + times.costs.kinds[k.name].orthogonalise)
        for k, n in stage.kinds
        if k.orthogonalised
    )
    return (1 / rate) * rows + float(by_muon)


def early_reads(times: StageTimes) -> float:
    """Seconds of NVMe reads for the update that may run before there are gradients."""
    stage, sizes = times.stage, times.stage.graph.sizes
    state = max(stage.graph.state_bytes(k, owned(stage, k)) for k, _ in stage.kinds)
    weights = 0 if sizes.master else sum(weight_bytes(stage, k) for k, _ in stage.kinds)
    ahead = CHUNK_STAGING * min(state, CHUNK + sizes.state) + STAGING * weights
    return ahead / times.costs.rates.nvme_read


def late_seconds(times: StageTimes, lane: str) -> Linear:
    """Seconds of what a lane may still have to write when the last layer is updated."""
    stage, rates = times.stage, times.costs.rates
    if lane == "d2h":
        ring = streaming_entries(stage.graph) * streaming_bytes(stage.graph)
        return (ring / rates.state_out) * stage.switch(None, "streaming")
    if lane == "write":
        weights = [
            weight_bytes(stage, k) * stage.switch(k, "staged_weights") for k, _ in stage.kinds
        ]
        staged = STAGING * total(weights) + float(CHUNK_STAGING * staged_chunk_bytes(stage.graph))
        return (1 / rates.nvme_write) * staged
    return NOTHING
