"""Memory rows: bytes a class of stages puts on each tier, equal to what its program allocates.

For host memory the row is only a lower bound if more layers have activations there than gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from bigplan.cost.costs import Costs
from bigplan.graph.graph import LayerKind, Recompute
from bigplan.graph.muon import workspace
from bigplan.lower.entries import (
    checkpoint_staging,
    data_staging,
    looked_up_bytes,
    staged_chunk_bytes,
    streaming_bytes,
    streaming_entries,
)
from bigplan.mechanics import CHUNK_STAGING, STAGING
from bigplan.placement import Tier
from bigplan.solve.linear import Capacity, Linear, Rule, Variable, total, var
from bigplan.solve.stage import RERUN, StageClass

BYTES_PER_SCALAR = 8  # a layer's square sum, and the clip factor
SHARED = ("slots", "sums")
GIB = 1 << 30  # sizes are decided in GiB: HiGHS drops coefficients below 1e-9 of the row's largest


def size_variables(stage: StageClass) -> Iterator[Variable]:
    """GiB of buffers that are as large as the largest of their users."""
    sizes = stage.graph.sizes
    for kind, _ in stage.kinds:
        if stage.interleaved and kind.stores_activations:
            most = float(sum(stage.entries(kind)))
            yield from (
                Variable(name, most, False) for r in RERUN for name in _lean(stage, kind, r).terms
            )
    shared = [kind for kind, _ in stage.kinds if stage.shares(kind)]
    if shared:
        widest = max(whole(stage, kind) for kind in shared)
        for name, element in zip(SHARED, (sizes.parameter, sizes.gradient), strict=True):
            yield Variable(f"{stage.name}.stage.gib.{name}", widest * element / GIB, False)
    largest = max(kind.workspace(r) for kind, _ in stage.kinds for r in (Recompute.NONE, *RERUN))
    yield Variable(f"{stage.name}.stage.gib.workspace", largest / GIB, False)


def ring_bytes(stage: StageClass, kind: LayerKind, name: str) -> Linear:
    """Bytes of an entry of each of the kind's rings of activations, one ring a policy."""
    return total(
        [
            kind.room(recompute) * stage.switch(kind, f"{name}.{recompute}")
            for recompute in stage.graph.recomputes
        ]
    )


def _shared_gib(stage: StageClass, name: str) -> Linear:
    """GiB of the slot, or the sum, that the model's ends share."""
    return var(f"{stage.name}.stage.gib.{name}")


def _shared_rules(stage: StageClass, kind: LayerKind) -> Iterator[Rule]:
    sizes = stage.graph.sizes
    for name, element in zip(SHARED, (sizes.parameter, sizes.gradient), strict=True):
        used = (whole(stage, kind) * element / GIB) * stage.switch(kind, name)
        yield Rule(f"{stage.name}: shared {name} hold {kind.name}", used - _shared_gib(stage, name))


def _lean(stage: StageClass, kind: LayerKind, recompute: Recompute) -> Linear:
    """Micro-batches held by the layers of interleaved chunks that recompute less than this."""
    return var(f"{stage.name}.{kind.name}.entries.{recompute}")


def _lean_rules(stage: StageClass, kind: LayerKind) -> Iterator[Rule]:
    """The first layers hold the most micro-batches, so these recompute most.

    The micro-batches that the others hold are then a convex function of the number of the others,
    with a piece for each chunk.
    """
    entries = stage.entries(kind)
    layers = Linear()
    for recompute in reversed(RERUN):
        layers += stage.keeping(kind, recompute)
        for start in sorted({entries.index(held) for held in entries}):
            held = entries[start]
            rest = (-held) * layers + float(sum(entries[start:]) + held * start)
            rule = f"{stage.name}.{kind.name}: less than {recompute} from layer {start} on"
            yield Rule(rule, rest - _lean(stage, kind, recompute))


def size_rules(stage: StageClass) -> Iterator[Rule]:
    """Each such buffer holds its largest user."""
    workspace = var(f"{stage.name}.stage.gib.workspace")
    for kind, _ in stage.kinds:
        if stage.shares(kind):
            yield from _shared_rules(stage, kind)
        if stage.interleaved and kind.stores_activations:
            yield from _lean_rules(stage, kind)
        for recompute in RERUN:
            needed = (kind.workspace(recompute) / GIB) * stage.switch(kind, f"again.{recompute}")
            if needed.terms:
                rule = f"{stage.name}: workspace of {kind.name}, {recompute}"
                yield Rule(rule, needed - workspace)
        plain = Linear(constant=kind.workspace(Recompute.NONE) / GIB)
        yield Rule(f"{stage.name}: workspace of {kind.name}", plain - workspace)


def capacities(stage: StageClass, costs: Costs) -> Iterator[Capacity]:
    """One row per tier: GPU bytes per device, host and NVMe bytes per node."""
    kinds, capacity, ranks = list(stage.kinds), costs.capacity, costs.sharing.ranks
    gpu = total([_gpu_bytes(stage, kind, count) for kind, count in kinds])
    gpu += GIB * var(f"{stage.name}.stage.gib.workspace") + hidden_bytes(stage)
    gpu += float(table_bytes(stage) + adapter_bytes(stage) + muon_bytes(stage))
    gpu += float(stage.graph.document_bytes)
    ring = streaming_entries(stage.graph) * streaming_bytes(stage.graph)
    gpu += float(ring) * stage.switch(None, "streaming")
    if any(stage.shares(kind) for kind, _ in kinds):
        gpu += GIB * total([_shared_gib(stage, name) for name in SHARED])
    host = total([_host_bytes(stage, kind) for kind, _ in kinds])
    host += CHUNK_STAGING * staged_chunk_bytes(stage.graph) * stage.switch(None, "state_chunks")
    host += float(STAGING * checkpoint_staging(stage.graph))
    if {kind.name for kind, _ in kinds} & {stage.graph.layers[0], stage.graph.layers[-1]}:
        nbytes, entries = data_staging(stage.graph)
        host += float(nbytes * entries)
    host += BYTES_PER_SCALAR * (1 + _square_sums(stage))
    yield Capacity(stage.name, Tier.GPU, gpu + costs.page_tables * host, capacity[Tier.GPU])
    yield Capacity(stage.name, Tier.HOST, ranks * host, capacity[Tier.HOST])
    nvme = total([_home_bytes(stage, kind, Tier.NVME) for kind, _ in kinds])
    yield Capacity(stage.name, Tier.NVME, ranks * nvme, capacity[Tier.NVME])


def weight_bytes(stage: StageClass, kind: LayerKind) -> int:
    """A layer's parameters at home."""
    sharded = stage.sharded(kind, 3) > 1
    elements = owned(stage, kind) if sharded else whole(stage, kind)
    return elements * stage.graph.sizes.parameter


def gradient_bytes(stage: StageClass, kind: LayerKind) -> int:
    """A layer's gradients at home."""
    sharded = stage.sharded(kind, 2) > 1
    elements = owned(stage, kind) if sharded else whole(stage, kind)
    return elements * stage.graph.sizes.gradient


def owned(stage: StageClass, kind: LayerKind) -> int:
    """Elements of a layer that one rank updates."""
    return kind.owned(stage.sharded(kind, 1))


def whole(stage: StageClass, kind: LayerKind) -> int:
    """Elements of a layer as all ranks have it, those that fill up the last part too."""
    return kind.padded(stage.sharded(kind, 1))


def _home_bytes(stage: StageClass, kind: LayerKind, tier: Tier) -> Linear:
    """What lives on a tier between its uses."""
    state = stage.graph.state_bytes(kind, owned(stage, kind))
    return total(
        [
            weight_bytes(stage, kind) * stage.tensor(kind, "parameters", tier),
            gradient_bytes(stage, kind) * stage.tensor(kind, "gradients", tier),
            state * stage.tensor(kind, "optimizer", tier),
            _kept_bytes(stage, kind, tier),
        ]
    )


def _kept_bytes(stage: StageClass, kind: LayerKind, tier: Tier) -> Linear:
    """Activations of all micro-batches that a stage holds."""
    entries = stage.entries(kind)
    if stage.interleaved and kind.stores_activations:
        if tier is not Tier.GPU:
            return Linear()
        more = [
            (kind.room(less) - kind.room(recompute)) * _lean(stage, kind, recompute)
            for less, recompute in pairwise(Recompute)
        ]
        return total(more) + float(kind.room(Recompute.FULL) * sum(entries))
    return total(
        [
            entries[0] * kind.room(recompute) * stage.policy(kind, recompute, tier)
            for recompute in stage.graph.recomputes
        ]
    )


def _gpu_bytes(stage: StageClass, kind: LayerKind, count: int) -> Linear:
    whole_weights = whole(stage, kind) * stage.graph.sizes.parameter
    whole_gradients = whole(stage, kind) * stage.graph.sizes.gradient
    ring = min(stage.least.slots, count)
    rings = [stage.least.slots * ring_bytes(stage, kind, "passing")]
    if not stage.shares(kind):
        rings.append(ring * whole_weights * stage.switch(kind, "slots"))
        sums = min(stage.least.sums, count)
        rings.append(sums * whole_gradients * stage.switch(kind, "sums"))
    rings.append(STAGING * looked_up_bytes(stage.graph) * stage.looked_up(kind))
    # Under ZeRO-3 streamed state is a shard, which passes through a separate ring.
    rings.append(ring * weight_bytes(stage, kind) * stage.switch(kind, "shards"))
    return total([_home_bytes(stage, kind, Tier.GPU), *rings])


def _host_bytes(stage: StageClass, kind: LayerKind) -> Linear:
    sizes = stage.graph.sizes
    weights = owned(stage, kind) * sizes.parameter * stage.switch(kind, "staged_weights")
    gradients = owned(stage, kind) * sizes.gradient * stage.switch(kind, "staged_gradients")
    on_disk = ring_bytes(stage, kind, "on_disk")
    rows = looked_up_bytes(stage.graph) * stage.looked_up(kind)
    staged = weights + gradients + on_disk + rows
    return _home_bytes(stage, kind, Tier.HOST) + STAGING * staged - _spared_bytes(stage, kind)


def _spared_bytes(stage: StageClass, kind: LayerKind) -> Linear:
    """Host memory that activations do not take: they lie in gradients' place, or in a ring."""
    held, lent = stage.entries(kind)[0], gradient_bytes(stage, kind)
    each = {recompute: held * kind.room(recompute) for recompute in stage.graph.recomputes}
    return total(
        [
            min(lent, nbytes) * stage.in_gradients(kind, recompute)
            + nbytes * stage.stays(kind, recompute)
            for recompute, nbytes in each.items()
        ]
    )


def adapter_bytes(stage: StageClass) -> int:
    """Bytes of a stage's adapters, their gradients and their state."""
    sizes = stage.graph.sizes
    others = stage.adapters * (sizes.parameter + sizes.gradient)
    return others + sizes.state_bytes(stage.adapters)


def muon_bytes(stage: StageClass) -> int:
    """Bytes that Muon's update of a layer makes and drops, beside those of passes."""
    return workspace(stage.graph)


def _square_sums(stage: StageClass) -> int:
    """One for each layer, or one for all adapters."""
    if stage.graph.frozen:
        return int(stage.adapters > 0)
    return sum(count for _, count in stage.kinds)


def table_bytes(stage: StageClass) -> int:
    """Bytes that a table takes besides on both stages if the first stage lends it to the last."""
    graph, names = stage.graph, {kind.name for kind, _ in stage.kinds}
    if not graph.lends_table:
        return 0
    elements, sizes = graph.kinds[graph.layers[0]].parameters, graph.sizes
    lends, borrows = (graph.layers[i] in names for i in (0, -1))
    gradients = 0 if graph.frozen else (lends + borrows) * sizes.gradient
    return elements * (gradients + borrows * sizes.parameter)


def hidden_bytes(stage: StageClass) -> float:
    """Rings of hidden states and of their gradients, and what is carried beside them.

    That of the first stage is kept by the embedding.
    """
    strategy, graph = stage.graph.strategy, stage.graph
    boundary = max(kind.boundary for kind, _ in stage.kinds) + graph.handed
    entries = strategy.accumulation_group * (1 if strategy.pp == 1 else 2)
    carried = graph.carried * stage.held if stage.stages[0] else 0
    return float(entries * boundary * (1 if strategy.pp == 1 else 2) + carried)
