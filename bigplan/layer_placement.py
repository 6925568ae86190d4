"""The placement of each layer of a stage, from the counts of layers in placement.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from bigplan.graph.graph import Graph, LayerKind, Recompute
from bigplan.placement import KindPlacement, Placement, Share, Tier

Picked = TypeVar("Picked")


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Placement of one layer, from the counts of its stage; frozen ones have no gradients."""

    parameters: Tier
    gradients: Tier | None
    recompute: Recompute
    activations: Tier
    rows: Mapping[Share, float]  # fractions of what a rank owns of the layer

    @property
    def visits(self) -> bool:
        """Whether the parameters are on the GPU only while they are used."""
        return self.parameters is not Tier.GPU

    @property
    def looks_up(self) -> bool:
        """Whether tables and their gradients, if any, are in host memory."""
        return self.parameters is Tier.HOST and self.gradients in (None, Tier.HOST)


def layer_table(
    placement: KindPlacement, *, frugal_first: bool = False, whole_states: bool = False
) -> tuple[LayerPlacement, ...]:
    """Turn counts into a placement of each layer.

    One order of layers serves all tensors, and each prefix of it is spread evenly over the layers.
    So layers whose gradients stay on the GPU are among those whose parameters stay there, or the
    other way round. The GPU's share of the optimizer falls on layers with both on the GPU.

    Layers with gradients in host memory are the first to get activations in host memory. There,
    activations may lie in the memory of the gradients. Of these activations, the largest are
    assigned first. `frugal_first`: the first layers recompute the most, because with
    interleaved chunks they hold the most micro-batches. `whole_states`: a layer's state is on one
    tier, and what the GPU does not hold is streamed.
    """
    count = placement.layers
    order = spread_order(count)
    parameters = _assign({tier: placement.parameters.get(tier, 0) for tier in Tier}, order)
    gradients: list[Tier | None] = [None] * count
    if placement.gradients:
        gradients = [*_assign({tier: placement.gradients.get(tier, 0) for tier in Tier}, order)]
    kept = {
        (recompute, tier): placement.activations.get(recompute, {}).get(tier, 0)
        for tier in (Tier.HOST, Tier.GPU, Tier.NVME)
        for recompute in Recompute
    }
    if frugal_first:
        policies = _assign(dict(reversed(kept.items())), list(range(count)))
    else:
        backwards = order[::-1]  # the order's first layers, which the GPU updates, come last
        policies = _assign(kept, sorted(backwards, key=lambda i: gradients[i] is not Tier.HOST))
    if whole_states:
        rows = _whole_rows(placement, parameters, gradients, order)
    else:
        rows = _row_fractions(placement, parameters, gradients)
    return tuple(
        LayerPlacement(
            parameters=parameters[i],
            gradients=gradients[i],
            recompute=policies[i][0],
            activations=policies[i][1],
            rows=rows[i],
        )
        for i in range(count)
    )


def _assign(counts: Mapping[Picked, int], order: list[int]) -> list[Picked]:
    """The choice of every layer: the first layers of `order` take the first choice, and so on."""
    chosen = [choice for choice, number in counts.items() for _ in range(number)]
    by_layer = dict(zip(order, chosen, strict=True))
    return [by_layer[layer] for layer in range(len(order))]


def _row_fractions(
    placement: KindPlacement, parameters: list[Tier], gradients: Sequence[Tier | None]
) -> list[dict[Share, float]]:
    """The fraction of each share, for every layer; none for frozen layers.

    The GPU's share is spread over layers with parameters and gradients on the GPU, the other shares
    over what is left. Layers with parameters or gradients on NVMe have nothing streamed.
    """
    if not placement.gradients:
        return [{} for _ in parameters]
    homes = list(zip(parameters, gradients, strict=True))
    resident = sum(p is g is Tier.GPU for p, g in homes)
    wanted = placement.optimizer
    on_gpu = [
        min(1.0, wanted.get(Tier.GPU, 0.0) / resident) if p is g is Tier.GPU else 0.0
        for p, g in homes
    ]
    rest = [
        0.0 if Tier.NVME in home else 1.0 - gpu for home, gpu in zip(homes, on_gpu, strict=True)
    ]
    left = sum(rest)  # may be 0 even where the solver's rounding leaves `streamed` above 0
    streamed = min(1.0, placement.streamed / left) if left else 0.0
    host, nvme = wanted.get(Tier.HOST, 0.0) - placement.streamed, wanted.get(Tier.NVME, 0.0)
    by_cpu = host / (host + nvme) if nvme > 0 else 1.0
    return [
        _shares(gpu, streamed * part, max(0.0, by_cpu))
        for gpu, part in zip(on_gpu, rest, strict=True)
    ]


def _whole_rows(
    placement: KindPlacement,
    parameters: list[Tier],
    gradients: Sequence[Tier | None],
    order: Sequence[int],
) -> list[dict[Share, float]]:
    """The GPU has the state of so many layers whose parameters and gradients it has."""
    resident = [i for i in order if parameters[i] is gradients[i] is Tier.GPU]
    on_gpu = set(resident[: round(placement.optimizer.get(Tier.GPU, 0.0))])
    return [_shares(float(i in on_gpu), float(i not in on_gpu), 1.0) for i in range(len(order))]


def _shares(gpu: float, streamed: float, host: float) -> dict[Share, float]:
    """The fractions of all shares. `host`: of what the CPU updates, the part with state in host."""
    cpu = max(0.0, 1.0 - gpu - streamed)
    return {
        Share.GPU: gpu,
        Share.STREAMED: streamed,
        Share.HOST: cpu * host,
        Share.NVME: cpu * (1.0 - host),
    }


def spread_order(count: int) -> list[int]:
    """An order of 0 .. count-1 whose every prefix is spread evenly (bit reversal)."""
    bits = max(1, (count - 1).bit_length())
    reversed_all = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [i for i in reversed_all if i < count]


def pieces(kind: LayerKind, placement: LayerPlacement, ranks: int) -> dict[Share, range]:
    """For each share, its range of the elements that one of `ranks` owns of the flat layer.

    The ranges follow each other in the order of Share, and are cut at whole units.
    """
    owned, fractions = kind.owned(ranks), placement.rows
    if kind.frozen:
        return {share: range(0) for share in Share}
    last = next(share for share in reversed(Share) if fractions.get(share, 0.0) > 0.0)
    parts, start, reached = {}, 0, 0.0
    for share in Share:
        reached += fractions.get(share, 0.0)
        units = int(reached * owned / kind.unit + 1e-9)
        end = owned if share is last else max(start, units * kind.unit)
        parts[share] = range(start, min(end, owned))
        start = parts[share].stop
    return parts


def stage_table(graph: Graph, placement: Placement, stage: int) -> dict[int, LayerPlacement]:
    """Placement of every layer of a stage, by layer index."""
    chunked = graph.strategy.vpp > 1
    tables = {
        kind: iter(
            layer_table(
                rows,
                frugal_first=chunked,
                whole_states=bool(graph.kinds[kind].orthogonalised),
            )
        )
        for kind, rows in placement.stages[stage].kinds.items()
    }
    table = {layer: next(tables[graph.layers[layer]]) for layer in graph.stage_layers(stage)}
    if graph.sizes.state or graph.frozen:
        return table
    # An optimizer without state has no state to stream or to read from NVMe. So the CPU updates
    # all that the GPU does not update.
    gpu = {layer: at.rows[Share.GPU] for layer, at in table.items()}
    return {layer: replace(at, rows=_shares(gpu[layer], 0.0, 1.0)) for layer, at in table.items()}
