"""Stages as the user reads them: blocks, recomputation, and where each kind of tensor lives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bigplan.graph.graph import Graph, Recompute
from bigplan.placement import KindPlacement, StagePlacement, Tier
from bigplan.plan import MemoryUse, Plan, graph_of

TENSORS = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Home:
    """What one tier holds of one kind of tensor of a stage.

    `layers` counts all layers, embedding and head among them. For activations it counts blocks, and
    `recompute` counts them by how much of their forward runs again. For the optimizer it need not
    be whole. `nbytes` are the bytes of one GPU, or for host and NVMe those of one node. `streamed`
    is the part of `layers` whose state passes through the GPU for its update, and
    `streamed_bytes` that part of `nbytes`.
    """

    layers: float
    nbytes: int
    recompute: Mapping[str, int]
    streamed: float = 0.0
    streamed_bytes: float = 0.0


@dataclass(frozen=True)
class StageShares:
    """Where the tensors of a stage live. `layers` and `recompute` count transformer blocks.

    `placement` maps a kind of tensor to the fraction of its bytes on each tier. These are the bytes
    of all layers of the stage, embedding and head among them. `streamed_fraction` is that of the
    bytes of optimizer state that are streamed through the GPU.
    """

    layers: int
    recompute: Mapping[str, int]
    placement: Mapping[str, Mapping[str, float]]
    homes: Mapping[str, Mapping[str, Home]]
    streamed_fraction: float = 0.0

    @property
    def recomputed(self) -> int:
        """The number of blocks that run at least a part of their forward twice."""
        return sum(n for policy, n in self.recompute.items() if policy != Recompute.NONE)


def stages_of(plan: Plan) -> list[StageShares]:
    """Every stage, first to last."""
    graph = graph_of(plan)
    return [
        _stage(graph, placed, [use for use in plan.predicted.memory if use.stage == number])
        for number, placed in enumerate(plan.placement.stages)
    ]


def _stage(graph: Graph, placed: StagePlacement, memory: list[MemoryUse]) -> StageShares:
    blocks = [kind for name, kind in placed.kinds.items() if graph.kinds[name].stores_activations]
    recompute = {
        str(policy): sum(sum(kind.activations.get(policy, {}).values()) for kind in blocks)
        for policy in Recompute
    }
    nbytes: dict[str, dict[str, float]] = {tensor: defaultdict(float) for tensor in TENSORS}
    for name, kind in placed.kinds.items():
        for tensor, tier, size in _sizes(graph, name, kind):
            nbytes[tensor][str(tier)] += size
    homes = dict(_homes(placed, blocks, {use.tier: use.by_purpose for use in memory}))
    placement = {tensor: _fractions(tiers) for tensor, tiers in nbytes.items()}
    state, part = homes["optimizer"], 0.0
    if Tier.HOST in state:
        host, part = state[Tier.HOST], _streamed_fraction(graph, placed)
        layers = sum(kind.streamed for kind in placed.kinds.values())
        state[Tier.HOST] = replace(host, streamed=layers, streamed_bytes=part * host.nbytes)
    return StageShares(
        layers=sum(kind.layers for kind in blocks),
        recompute={policy: count for policy, count in recompute.items() if count},
        placement=placement,
        homes=homes,
        streamed_fraction=part * placement["optimizer"].get(Tier.HOST, 0.0),
    )


def _streamed_fraction(graph: Graph, placed: StagePlacement) -> float:
    """Of the optimizer state in host memory, the fraction that passes through the GPU."""
    whole = part = 0.0
    for name, kind in placed.kinds.items():
        elements = graph.kinds[name].parameters
        whole += kind.optimizer.get(Tier.HOST, 0.0) * elements
        part += kind.streamed * elements
    return part / whole if graph.sizes.state else 0.0


def _sizes(graph: Graph, name: str, kind: KindPlacement) -> list[tuple[str, Tier, float]]:
    """Sizes of one kind of layer by tensor and tier, in a unit that depends on the tensor only."""
    layer = graph.kinds[name]
    sizes = [
        (tensor, tier, float(count * layer.parameters))
        for tensor in ("parameters", "gradients", "optimizer")
        for tier, count in getattr(kind, tensor).items()
    ]
    for policy, tiers in kind.activations.items():
        kept = float(layer.room(policy))
        sizes += [("activations", tier, count * kept) for tier, count in tiers.items()]
    return sizes


def _fractions(tiers: Mapping[str, float]) -> dict[str, float]:
    whole = sum(tiers.values())
    return {str(t): tiers[t] / whole for t in Tier if tiers.get(t)} if whole else {}


def _homes(
    placed: StagePlacement, blocks: list[KindPlacement], memory: Mapping[Tier, Mapping[str, int]]
) -> Iterator[tuple[str, dict[str, Home]]]:
    for tensor in TENSORS:
        homes: dict[str, Home] = {}
        for tier in Tier:
            policies = _policies(blocks, tier) if tensor == "activations" else {}
            layers = sum(policies.values()) or sum(
                getattr(kind, tensor).get(tier, 0.0)
                for kind in placed.kinds.values()
                if tensor != "activations"
            )
            if layers > 0:
                nbytes = memory.get(tier, {}).get(tensor, 0)
                homes[str(tier)] = Home(round(layers, 6), nbytes, policies)
        yield tensor, homes


def _policies(blocks: list[KindPlacement], tier: Tier) -> dict[str, int]:
    counts = {
        str(policy): sum(kind.activations.get(policy, {}).get(tier, 0) for kind in blocks)
        for policy in Recompute
    }
    return {policy: count for policy, count in counts.items() if count}
