"""Seconds of Muon's directions, beyond what moves an element's parameter, gradient and state.

Products are priced as those of passes, in bf16. Where ZeRO shards layers, ranks gather what is to
be orthogonalised while the GPU waits, and each does the matrices of which it owns a part. So do
tensor-parallel ranks of each matrix that they split; each does all of it.
"""

from __future__ import annotations

from dataclasses import replace

from bigplan.cost.collective import all_gather, shard_group, tensor_group
from bigplan.cost.compute import Device, operator_seconds
from bigplan.errors import InputError
from bigplan.graph.graph import Graph, LayerKind, Tensor
from bigplan.graph.muon import (
    ELEMENT,
    at_once,
    gathered_elements,
    parts,
    products,
    shape_of,
    touched,
)
from bigplan.graph.operators import Stream
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.training import Training

# Kernels that the host launches for a tensor: its momentum (cast, divided, moved, taken into the
# direction, rounded), its decay, its step and its 16-bit copy; for a batch of its matrices the
# norm, clamped, and the division; three products an iteration. Small matrices wait for these.
KERNELS, OF_BATCH, PRODUCTS = 8, 3, 3


def orthogonalise_seconds(
    graph: Graph, kind: LayerKind, training: Training, device: Device, nodes: NodeGroup
) -> float:
    """Of one layer, on the rank with the most to do. Raises InputError for a GPU without bf16."""
    if not kind.orthogonalised:
        return 0.0
    if "bf16" not in device.gpu.peak_flops:
        raise InputError(
            f"{device.gpu.name} states no peak for bf16, in which Muon makes its directions; use "
            "optimizer adamw, or add bf16 to its peak_flops if it has it"
        )
    in_bf16, steps = replace(device, precision="bf16"), training.optimizer.ns_steps

    tensor_ranks = tensor_group(graph.strategy, nodes)

    def seconds(part: Tensor, whole: Tensor) -> float:
        gathered = ELEMENT * gathered_elements(part, whole, graph.strategy.tp)
        # Parts are put together, and the own one is taken out.
        copied = Stream("parts", 2 * (gathered + ELEMENT * part.elements))
        operators = (*products((whole,), steps), *((copied,) if gathered else ()))
        gathering = all_gather(gathered, tensor_ranks) if gathered else 0.0
        on_gpu = sum(operator_seconds(one, in_bf16) for one in operators)
        if not device.gpu.runs_kernels:
            return on_gpu + gathering
        batches = -(-shape_of(whole)[0] // at_once(whole))
        kernels = KERNELS + batches * (PRODUCTS * steps + OF_BATCH)
        kernels += (graph.strategy.tp // part.holders + 1) if gathered else 0
        return max(on_gpu, kernels * device.gpu.launch_overhead) + gathering

    both = zip(kind.orthogonalised, kind.directions, strict=True)
    each = {part: seconds(part, whole) for part, whole in both}
    shards = graph.strategy.zero_ranks
    if shards == 1:
        return sum(each.values())
    several = (
        sum(each[t] for t in touched(kind, p)) for p in parts(kind.tensors, kind.owned(shards))
    )
    gathering = all_gather(ELEMENT * kind.padded(shards), shard_group(graph.strategy, nodes))
    return max(*each.values(), *several) + gathering
