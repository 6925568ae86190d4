"""Trained numbers of experts by which a token's weights are multiplied, as in Gemma 4.

Their gradient is a sum over tokens, by way of a number for each token and expert, so that nothing
is added in an order that chance decides.
"""

from __future__ import annotations

from torch import Tensor

from bigplan.runtime.experts.dispatch import Places


def scaled(weights: Tensor, places: Places, scales: Tensor) -> Tensor:
    """Weights fp32 [rows] times the numbers [experts] of the rows' experts."""
    experts = places.chosen.flatten()[places.order]
    return weights * scales.float()[experts]


def by_scales(by_scaled: Tensor, weights: Tensor, places: Places, scales: Tensor) -> Tensor:
    """The gradient by `scaled`'s numbers, in their dtype, of that by its result, fp32 [rows]."""
    by_choice = (by_scaled * weights)[places.rows].view(places.chosen.shape)
    every = by_choice.new_zeros(len(by_choice), len(scales))
    return every.scatter_(-1, places.chosen.long(), by_choice).sum(0).to(scales.dtype)
