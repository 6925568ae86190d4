"""Gradients of rows that were looked up, added to their sums where those are.

From autograd the gradient of a table is as large as the table for every micro-batch (1.05 GB for
128,256 words of 4096 in 16 bits), beside partial sums in fp32 of a row a token and a tenth more
(EmbeddingBackwardKernel.cu of torch 2.11). Here it takes a few rows at a time, which is what lets
a large vocabulary train on a small GPU, and 16-bit gradients are added up before they are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigplan.graph.graph import LOOKED_UP_ROWS


def add_rows(total: Tensor, rows: Tensor, gradients: Tensor) -> None:
    """Add gradients[i] to row rows[i] of `total`, for all i.

    total [V, h], rows int64 [n], gradients [n, h], on one device. Of LOOKED_UP_ROWS at a time,
    those of equal rows are added in fp32 and then to `total` once, so that a result never depends
    on the order in which a device's threads come.
    """
    parts = (torch.split(tensor, LOOKED_UP_ROWS) for tensor in (rows, gradients))
    for some, theirs in zip(*parts, strict=True):
        _add(total, some, theirs)


def _add(total: Tensor, rows: Tensor, gradients: Tensor) -> None:
    """Without a look at any value from the host, which would have to wait for the device."""
    ranked, order = rows.sort(stable=True)
    group = torch.zeros_like(ranked)  # of equal rows, by rank
    group[1:] = (ranked[1:] != ranked[:-1]).cumsum(0)
    sums = torch.ops.aten.embedding_dense_backward(
        gradients.float(), torch.empty_like(group).scatter_(0, order, group), len(rows), -1, False
    )
    # Groups that there are not add zeros to row 0.
    targets = torch.zeros_like(ranked).scatter_(0, group, ranked)
    total.index_add_(0, targets, sums.to(total.dtype))
