"""Sizes of DeepSpeed's buffers, from the model and the machine; none is left to a default.

DeepSpeed's own defaults have 500 million elements and more, whatever the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from bigplan.graph.graph import Graph
from bigplan.placement import Tier
from bigplan.spec.cluster import NodeGroup

BUCKET = 500_000_000  # elements at most: DeepSpeed's reduce_bucket_size
SUB_GROUP = 1_000_000_000  # elements at most: DeepSpeed's sub_group_size
# Elements of state on a drive; each of its tensors has a buffer of 400 MB.
SWAPPED_SUB_GROUP = 100_000_000
# Tensors are weights, gradients and two moments. One group is updated, one is read, one is written,
# and one is in between.
SWAPPED_TENSORS, SWAPPED_GROUPS = 4, 4
# Groups of the state under Twin-Flow, about, and the CPU's shares that are tried: finer shares
# would leave as many groups on the GPU.
PARTS = 40
PREFETCHED_BLOCKS = 1
LIVE_BLOCKS = 2  # blocks whose parameters are on the GPU at a time, where parameters live elsewhere
AIO_BLOCK = 1 << 20  # bytes of a request to a drive
AIO_SECONDS = 0.01  # requests under way hold so many seconds of the drive's rate


@dataclass(frozen=True)
class BufferSizes:
    """Sizes in elements, unless a comment says otherwise."""

    parameters: int  # of the model
    owned: int  # by a rank, where states are shared out
    largest: int  # parameter
    vector: int  # the largest parameter of one dimension
    block: int
    matrices: int  # of a block
    bucket: int
    sub_group: int
    # A rank's parts of the parameters, in order. Matrices and vectors are two groups of the
    # optimizer, which applies weight decay to matrices only.
    parts: tuple[tuple[int, ...], tuple[int, ...]]
    buffers: int  # number of buffers for state on a drive
    queue: int  # requests to a drive at once
    live: int  # elements that ZeRO-3 holds gathered at a time
    swap_buffers: int  # number of buffers for parameters on a drive
    swap_buffer: int  # elements of each of these

    @cached_property
    def swapped(self) -> int:
        """The largest group of state, which is read from a drive at once."""
        return max(self.groups)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """A rank's sub-groups of state: parameters in a row until there are `sub_group` of them.

        So a group may be larger by up to a parameter (0.19.8, stage3.py: _create_fp16_sub_groups).
        """
        return tuple(chain.from_iterable(_grouped(some, self.sub_group) for some in self.parts))

    def resident(self, on_cpu: float) -> int:
        """Elements of the groups that Twin-Flow leaves on the GPU if the CPU is to have a share.

        Only whole groups stay, the first ones (0.19.8, stage3.py: _create_fp32_partitions).
        """
        return sum(self.groups[: int((1 - on_cpu) * len(self.groups))])


def sizes_of(graph: Graph, nodes: NodeGroup, state: Tier, *, partly: bool) -> BufferSizes:
    """`partly`: Twin-Flow shares the state out between CPU and GPU."""
    kinds = [graph.kinds[name] for name in graph.layers]
    tensors = [tensor for kind in graph.kinds.values() for tensor in kind.tensors]
    parameters = sum(kind.parameters for kind in kinds)
    owned = -(-parameters // (graph.strategy.zero_group or graph.strategy.dp))
    block = graph.kinds["block"]
    matrices = sum(tensor.rows > 1 for tensor in block.tensors)
    largest = max(tensor.elements for tensor in tensors)
    sub_group = min(SWAPPED_SUB_GROUP if state is Tier.NVME else SUB_GROUP, owned)
    if partly:
        sub_group = min(sub_group, -(-owned // PARTS))
    rate = nodes.nvme.node_read if nodes.nvme else 0.0
    return BufferSizes(
        parameters=parameters,
        owned=owned,
        largest=largest,
        vector=max((tensor.elements for tensor in tensors if tensor.rows == 1), default=1),
        block=block.parameters,
        matrices=matrices,
        bucket=min(BUCKET, max(block.parameters, 1)),
        sub_group=sub_group,
        parts=_parts(graph),
        buffers=SWAPPED_TENSORS * SWAPPED_GROUPS,
        queue=_power(rate * AIO_SECONDS / AIO_BLOCK),
        live=LIVE_BLOCKS * block.parameters,
        # Every parameter on the GPU holds a buffer of the largest parameter's size.
        swap_buffers=(LIVE_BLOCKS + 2) * matrices + 2,
        swap_buffer=largest,
    )


def _parts(graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tensors = [tensor for name in graph.layers for tensor in graph.kinds[name].tensors]
    ranks = graph.strategy.zero_group or graph.strategy.dp
    matrices = tuple(-(-t.elements // ranks) for t in tensors if t.rows > 1)
    return matrices, tuple(-(-t.elements // ranks) for t in tensors if t.rows == 1)


def _grouped(sizes: tuple[int, ...], least: int) -> Iterator[int]:
    """Sizes added up in a row, until each sum but the last is `least` or more."""
    elements = 0
    for size in sizes:
        elements += size
        if elements >= least:
            yield elements
            elements = 0
    if elements:
        yield elements


def _power(number: float) -> int:
    """The next power of two from 8 to 128."""
    found = 8
    while found < min(number, 128):
        found *= 2
    return found
