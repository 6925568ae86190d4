"""Biases of experts, as products with a matrix [out, experts] that has a column for each expert.

A row's bias is that of its expert: the product with the expert's unit vector. What a token gets of
its experts' last biases is the product with its weights of all experts. So one product adds the
biases in one pass over rows or tokens, and its gradient is one as well, in the same bits every
time; no row waits for another, and nothing on the device is asked for. Vectors have as many
elements as there are experts, which is little beside a row.

Tensor-parallel ranks have the first biases of their part of every expert's columns, and the last
biases of their part of the experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigplan.runtime.experts import Places
from bigplan.runtime.tensor_parallel import TensorParallel


def unit_vectors(places: Places, experts: int, dtype: torch.dtype) -> Tensor:
    """For each row the unit vector of its expert, [rows, experts]."""
    mine = places.chosen.flatten()[places.order]
    return (mine[:, None] == torch.arange(experts, device=mine.device)).to(dtype)


def add_biases_(rows: Tensor, vectors: Tensor, biases: Tensor) -> Tensor:
    """Rows [rows, out] with the biases [out, experts] of their experts."""
    return rows.addmm_(vectors, biases.T)


def own(vectors: Tensor, ranks: TensorParallel) -> Tensor:
    """The columns of this rank's part of the experts."""
    return vectors if ranks.alone else vectors.chunk(ranks.group.size, dim=1)[ranks.group.place]


def weights_of_all(
    places: Places, weights: Tensor, experts: int, dtype: torch.dtype, ranks: TensorParallel
) -> Tensor:
    """A token's weights of this rank's part of the experts, [tokens, experts of the rank].

    `weights`, fp32 [rows], are those of the rows' experts; others are zero.
    """
    by_choice = weights.detach()[places.rows].view(places.chosen.shape).to(dtype)
    every = torch.zeros(len(by_choice), experts, dtype=dtype, device=weights.device)
    return own(every.scatter_(1, places.chosen.long(), by_choice), ranks)


def by_row(places: Places, by_weights: Tensor, experts: int, ranks: TensorParallel) -> Tensor:
    """The gradient by rows' weights, fp32 [rows], of that by weights_of_all's result."""
    if not ranks.alone:
        every = by_weights.new_zeros(len(by_weights), experts)
        own(every, ranks).copy_(by_weights)
        by_weights = every
    return by_weights.gather(1, places.chosen.long()).flatten()[places.order].float()
