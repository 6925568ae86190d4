"""What a rank tells beside its figures when it ends."""

from __future__ import annotations

import torch

from bigplan.cost.collective import shard_group
from bigplan.runtime.context import Context
from bigplan.runtime.generated import sized_as
from bigplan.runtime.memory.host_memory import resident_bytes
from bigplan.runtime.parallel.copy_engines import why_no_copy_engines
from bigplan.spec.cluster import NodeGroup


def notes_of(device: torch.device, context: Context, nodes: NodeGroup) -> tuple[str, ...]:
    """Notes of a rank's device; the context's memory still has its sizes."""
    if device.type == "cuda":
        notes = sized_as(context.training, device), _gathered(context, nodes)
        return tuple(note for note in notes if note)
    memory = context.memory
    process = max(0, resident_bytes() - memory.arena.size - memory.slab.size) / 2**20
    return (
        f"beside its tensors a worker's process takes about {round(process, -2):.0f} MiB of host "
        "memory here, for Python and torch; a plan leaves half of such a machine free for it",
        "measured GPU memory is the arena of this CPU device; hidden states, saved "
        "activations and workspace, which the promise includes, are not measured here",
    )


def _gathered(context: Context, nodes: NodeGroup) -> str:
    """Where the plan counts on copy engines, and kernels gathered parameters."""
    group, device = context.groups.shard, context.memory.device
    strategy = context.graph.strategy
    planned = strategy.zero > 0 and shard_group(strategy, nodes).by_copy_engines
    if group.size == 1 or group.copy_engines is not None or not planned:
        return ""
    reason = why_no_copy_engines(device) or "ranks have other memory, or share a GPU"
    return (
        "kernels of NCCL gathered parameters, and took multiprocessors from products; the plan has "
        f"copy engines do it, which want NCCL 2.28 and ranks that see each other's GPUs: {reason}"
    )
