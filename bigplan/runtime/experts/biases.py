"""Biases of experts, as products with a matrix [out, experts] that has a column for each expert.

A row's bias is that of its expert: the product with the expert's unit vector. What a token gets of
its experts' last biases is the product with its weights of all experts. So one product adds the
biases in one pass over rows or tokens, and its gradient is one as well, in the same bits every
time; no row waits for another, and nothing on the device is asked for. Vectors have as many
elements as there are experts, which is little beside a row.

Tensor-parallel ranks have the first biases of their part of every expert's columns, and the last
biases of their part of the experts. Expert-parallel ranks have all experts' biases: the first they
add to the rows of their own experts, the last to their own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigplan.runtime.experts.dispatch import Places
from bigplan.runtime.parallel.tensor_parallel import TensorParallel


def unit_vectors(places: Places, experts: int, dtype: torch.dtype, first: int = 0) -> Tensor:
    """For each row the unit vector of its expert, [rows, experts]; places count from `first`."""
    mine = places.chosen.flatten()[places.order] + first
    return (mine[:, None] == torch.arange(experts, device=mine.device)).to(dtype)


def add_biases_(rows: Tensor, vectors: Tensor, biases: Tensor) -> Tensor:
    """Rows [rows, out] with the biases [out, experts] of their experts."""
    return rows.addmm_(vectors, biases.T)


def weights_of_all(
    places: Places, weights: Tensor, dtype: torch.dtype, ranks: TensorParallel, biases: Tensor
) -> Tensor:
    """A token's weights of the experts that this rank has biases [out, experts] of.

    `weights`, fp32 [rows], are those of the rows' experts; others are zero: [tokens, experts].
    """
    by_choice = weights.detach()[places.rows].view(places.chosen.shape).to(dtype)
    every = by_choice.new_zeros(len(by_choice), biases.shape[1] * ranks.group.size)
    return _own(every.scatter_(1, places.chosen.long(), by_choice), ranks)


def by_row(places: Places, by_weights: Tensor, ranks: TensorParallel) -> Tensor:
    """The gradient by rows' weights, fp32 [rows], of that by weights_of_all's result."""
    if not ranks.alone:
        tokens, own = by_weights.shape
        every = by_weights.new_zeros(tokens, own * ranks.group.size)
        _own(every, ranks).copy_(by_weights)
        by_weights = every
    return by_weights.gather(1, places.chosen.long()).flatten()[places.order].float()


def _own(vectors: Tensor, ranks: TensorParallel) -> Tensor:
    """The columns of this rank's part of the experts."""
    return vectors if ranks.alone else vectors.chunk(ranks.group.size, dim=1)[ranks.group.place]
