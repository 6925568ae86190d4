"""Seconds of Muon's directions, beyond what moves an element's parameter, gradient and state.

Products are priced as those of passes, in bf16. Where ZeRO shards layers, ranks gather what is to
be orthogonalised while the GPU waits, and each does the matrices of which it owns a part.
"""

from __future__ import annotations

from dataclasses import replace

from bigplan.cost.collective import all_gather, data_group
from bigplan.cost.compute import Device, operator_seconds
from bigplan.graph.graph import Graph, LayerKind, Tensor
from bigplan.graph.muon import ELEMENT, parts, products, touched
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.training import Training


def orthogonalise_seconds(
    graph: Graph, kind: LayerKind, training: Training, device: Device, nodes: NodeGroup
) -> float:
    """Of one layer, on the rank with the most to do. Raises InputError for a GPU without bf16."""
    if not kind.orthogonalised:
        return 0.0
    in_bf16 = replace(device, precision="bf16")

    def seconds(tensors: tuple[Tensor, ...]) -> float:
        found = products(tensors, training.optimizer.ns_steps)
        return sum(operator_seconds(one, in_bf16) for one in found)

    each = {tensor: seconds((tensor,)) for tensor in kind.orthogonalised}
    shards = graph.strategy.shards if graph.strategy.zero else 1
    if shards == 1:
        return sum(each.values())
    several = (
        sum(each[t] for t in touched(kind, p)) for p in parts(kind.tensors, kind.owned(shards))
    )
    gathering = all_gather(ELEMENT * kind.padded(shards), data_group(graph.strategy, nodes))
    return max(*each.values(), *several) + gathering
