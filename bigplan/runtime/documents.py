"""Where documents are in the micro-batches of the step under way, for attention that isolates them.

All of a step's are in GPU memory before its first action. So every layer of every stage finds them
at one place, CUDA graphs too, and no message has them: each rank reads them in its own copy of the
data (runtime/data.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigplan.graph.graph import Graph
from bigplan.program import DOCUMENTS
from bigplan.runtime.memory.buffers import Memory


class Documents:
    """Bounds of documents (bigplan/data/documents.py) by micro-batch."""

    def __init__(self, graph: Graph, memory: Memory) -> None:
        # On the device and in host memory, int32 [micro-batches, micro_batch, 2, sequence_length].
        flat = memory.view((DOCUMENTS, 0), torch.int32, graph.document_bytes // 4)
        shape = graph.micro_batches, graph.strategy.micro_batch, 2, -1
        self._there = flat.view(shape)
        self._here = torch.empty(0, dtype=torch.int32)

    def fill(self, bounds: Tensor) -> None:
        """Those of the next step; nothing runs on the device."""
        assert bounds.shape == self._there.shape, (bounds.shape, self._there.shape)
        self._here = bounds
        self._there.copy_(bounds)

    def bounds(self, micro_batch: int) -> Tensor:
        """int32 [micro_batch, 2, sequence_length], on the device."""
        return self._there[micro_batch]

    def begins_here(self, micro_batch: int) -> Tensor:
        """Where each token's document begins, int32 [micro_batch, s] in host memory."""
        return self._here[micro_batch, :, 0]
