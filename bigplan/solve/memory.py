"""Memory rows: bytes a class of stages puts on each tier, equal to what its program allocates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bigplan.graph.graph import LayerKind, Recompute
from bigplan.lower.layout import CHUNK_STAGING, PAGE, STAGING
from bigplan.placement import CHUNK, SLOTS, Tier
from bigplan.solve.linear import Capacity, Linear, Rule, Variable, total, var
from bigplan.solve.stage import StageClass

BYTES_PER_SCALAR = 8  # a layer's square sum, and the clip factor
GIB = 1 << 30  # sizes are decided in GiB: HiGHS drops coefficients below 1e-9 of the row's largest


def size_variables(stage: StageClass) -> Iterator[Variable]:
    """GiB of buffers that are as large as the largest of their users."""
    for kind, _ in stage.kinds:
        upper = max(kind.saved, kind.boundary) / GIB
        yield Variable(f"{stage.name}.{kind.name}.gib.passing", upper, False)
        yield Variable(f"{stage.name}.{kind.name}.gib.on_disk", upper, False)
    largest = max(kind.workspace(recompute) for kind, _ in stage.kinds for recompute in Recompute)
    yield Variable(f"{stage.name}.stage.gib.workspace", largest / GIB, False)


def size_rules(stage: StageClass) -> Iterator[Rule]:
    """Each such buffer holds its largest user."""
    workspace = var(f"{stage.name}.stage.gib.workspace")
    for kind, _ in stage.kinds:
        for name in ("passing", "on_disk"):
            size = var(f"{stage.name}.{kind.name}.gib.{name}")
            for recompute in Recompute:
                user = (kind.kept(recompute) / GIB) * stage.switch(kind, f"{name}.{recompute}")
                yield Rule(f"{stage.name}.{kind.name}: {name} holds {recompute}", user - size)
        again = (kind.workspace(Recompute.FULL) / GIB) * stage.switch(kind, "recompute")
        yield Rule(f"{stage.name}: workspace of {kind.name}, recomputed", again - workspace)
        plain = Linear(constant=kind.workspace(Recompute.NONE) / GIB)
        yield Rule(f"{stage.name}: workspace of {kind.name}", plain - workspace)


def capacities(
    stage: StageClass, capacity: Mapping[Tier, int], ranks_per_node: int
) -> Iterator[Capacity]:
    """One row per tier: GPU bytes per device, host and NVMe bytes per node."""
    kinds = list(stage.kinds)
    gpu = total([_gpu_bytes(stage, kind, count) for kind, count in kinds])
    gpu += GIB * var(f"{stage.name}.stage.gib.workspace") + hidden_bytes(stage)
    yield Capacity(stage.name, Tier.GPU, gpu, capacity[Tier.GPU])
    host = total([_host_bytes(stage, kind, count) for kind, count in kinds])
    host += CHUNK_STAGING * _chunk_bytes(stage) * stage.switch(None, "state_chunks")
    host += BYTES_PER_SCALAR * (1 + sum(count for _, count in kinds))
    yield Capacity(stage.name, Tier.HOST, ranks_per_node * host, capacity[Tier.HOST])
    nvme = total([_home_bytes(stage, kind, Tier.NVME) for kind, _ in kinds])
    yield Capacity(stage.name, Tier.NVME, ranks_per_node * nvme, capacity[Tier.NVME])


def weight_bytes(stage: StageClass, kind: LayerKind) -> int:
    """A layer's parameters at home."""
    return _share(kind.parameters, stage.sharded(kind, 3)) * stage.graph.sizes.parameter


def gradient_bytes(stage: StageClass, kind: LayerKind) -> int:
    """A layer's gradients at home."""
    return _share(kind.parameters, stage.sharded(kind, 2)) * stage.graph.sizes.gradient


def owned(stage: StageClass, kind: LayerKind) -> int:
    """Elements of a layer that one rank updates."""
    return _share(kind.parameters, stage.sharded(kind, 1))


def _share(elements: int, ranks: int) -> int:
    return -(-elements // ranks)


def _home_bytes(stage: StageClass, kind: LayerKind, tier: Tier) -> Linear:
    """What lives on a tier between its uses."""
    entries = 1 if stage.is_loss(kind) else stage.held
    state = owned(stage, kind) * stage.graph.sizes.state
    kept = [
        entries * kind.kept(recompute) * stage.policy(kind, recompute, tier)
        for recompute in Recompute
    ]
    return total(
        [
            weight_bytes(stage, kind) * stage.tensor(kind, "parameters", tier),
            gradient_bytes(stage, kind) * stage.tensor(kind, "gradients", tier),
            state * stage.tensor(kind, "optimizer", tier),
            *kept,
        ]
    )


def _gpu_bytes(stage: StageClass, kind: LayerKind, count: int) -> Linear:
    whole_weights = kind.parameters * stage.graph.sizes.parameter
    whole_gradients = kind.parameters * stage.graph.sizes.gradient
    ring = stage.ring(count)
    rings = [
        ring * whole_weights * stage.switch(kind, "slots"),
        min(STAGING, count) * whole_gradients * stage.switch(kind, "sums"),
        SLOTS * GIB * var(f"{stage.name}.{kind.name}.gib.passing"),
    ]
    if stage.sharded(kind, 3) > 1:  # streamed shards pass through a ring of their own
        rings.append((ring / count) * weight_bytes(stage, kind) * stage.away(kind, "parameters"))
    return total([_home_bytes(stage, kind, Tier.GPU), *rings])


def _host_bytes(stage: StageClass, kind: LayerKind, count: int) -> Linear:
    weights = weight_bytes(stage, kind) * stage.switch(kind, "staged_weights")
    gradients = gradient_bytes(stage, kind) * stage.switch(kind, "staged_gradients")
    on_disk = var(f"{stage.name}.{kind.name}.gib.on_disk")
    return _home_bytes(stage, kind, Tier.HOST) + STAGING * (weights + gradients + GIB * on_disk)


def hidden_bytes(stage: StageClass) -> float:
    """Rings of hidden states and of their gradients."""
    strategy = stage.graph.strategy
    boundary = max(kind.boundary for kind, _ in stage.kinds)
    entries = strategy.accumulation_group * (1 if strategy.pp == 1 else 2)
    return float(entries * boundary * (1 if strategy.pp == 1 else 2))


def _chunk_bytes(stage: StageClass) -> int:
    kinds = stage.graph.kinds.values()
    widest = max(tensor.columns for kind in kinds for tensor in kind.tensors)
    return -(-(CHUNK + widest * stage.graph.sizes.state) // PAGE) * PAGE
