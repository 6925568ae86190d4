"""The activation of Nemotron 3's experts, the square of relu (So et al., arXiv 2109.08668), times a
weight for each row: by torch's operators. Such experts have no gate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted(gate: Tensor | None, up: Tensor, weights: Tensor) -> Tensor:
    """The activation of rows [rows, f] times a weight each, fp32 [rows]."""
    assert gate is None, "of gated experts"
    return F.relu(up).square_().mul_(weights[:, None])


def weighted_backward(
    gate: Tensor | None, up: Tensor, weights: Tensor, gradient: Tensor
) -> tuple[None, Tensor, Tensor]:
    """Gradients by no gate, up and weights; weighted(gate, up, weights) goes to `gradient`."""
    assert gate is None, "of gated experts"
    opened = F.relu(up)
    inner = opened.square()
    by_weights = (inner * gradient).sum(-1, dtype=torch.float32)
    by_up = opened.mul_(2.0).mul_(gradient.mul_(weights[:, None]))
    torch.mul(inner, weights[:, None], out=gradient)
    return None, by_up, by_weights
