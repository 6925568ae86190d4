"""Rows of queries and keys in the order of files that have rope's pairs side by side, and in ours.

Row i of a head goes with row i + r / 2 here, of r rows that rope turns (positions.rope_table), and
row 2 i with row 2 i + 1 there. Files of models that turn the other way have the two halves swapped.
Scores are sums over a head's columns, so the order changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigplan.spec.hf.weights import Pairs


def apart(rows: Tensor, pairs: Pairs | None) -> Tensor:
    """Whole heads' rows [n, ...] of such a file, in our order; without pairs as they are."""
    if pairs is None:
        return rows
    heads = rows.view(-1, pairs.head, *rows.shape[1:])
    turned = heads[:, : pairs.turned]
    if pairs.swapped:
        return _swapped(heads, pairs.turned)
    return torch.cat((turned[:, ::2], turned[:, 1::2], heads[:, pairs.turned :]), 1).flatten(0, 1)


def side_by_side(rows: Tensor, pairs: Pairs | None) -> Tensor:
    """Whole heads' rows [n, ...] of ours, in the order of such a file."""
    if pairs is None:
        return rows
    heads = rows.view(-1, pairs.head, *rows.shape[1:])
    if pairs.swapped:
        return _swapped(heads, pairs.turned)
    first, second = heads[:, : pairs.turned].chunk(2, dim=1)
    turned = torch.stack((first, second), 2).flatten(1, 2)
    return torch.cat((turned, heads[:, pairs.turned :]), 1).flatten(0, 1)


def _swapped(heads: Tensor, turned: int) -> Tensor:
    first, second = heads[:, :turned].chunk(2, dim=1)
    return torch.cat((second, first, heads[:, turned:]), 1).flatten(0, 1)
