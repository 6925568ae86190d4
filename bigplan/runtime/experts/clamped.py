"""The activation of GPT-OSS's experts, (u + 1) g sigmoid(1.702 g), where g is the gate up to 7 and
u within 7 of zero, times a weight for each row: by torch's operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigplan.spec.clamped import ALPHA, LIMIT


def weighted(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """The activation of rows [rows, f] times a weight each, fp32 [rows]."""
    gate = gate.clamp(max=LIMIT)
    opened = (gate * ALPHA).sigmoid_().mul_(gate)
    return up.clamp(-LIMIT, LIMIT).add_(1.0).mul_(opened).mul_(weights[:, None])


def weighted_backward(
    gate: Tensor, up: Tensor, weights: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by gate, up and weights; weighted(gate, up, weights) goes to `gradient`."""
    limited, other = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT).add_(1.0)
    share = (limited * ALPHA).sigmoid_()
    opened = limited * share
    inner = opened * other
    by_weights = (inner * gradient).sum(-1, dtype=torch.float32)
    gradient.mul_(weights[:, None])
    # sigmoid (1 + 1.702 g (1 - sigmoid))
    slope = limited.mul_(1.0 - share).mul_(ALPHA).add_(1.0).mul_(share)
    by_gate = other.mul_(slope).mul_(gradient).masked_fill_(gate > LIMIT, 0.0)
    by_up = opened.mul_(gradient).masked_fill_(up.abs() > LIMIT, 0.0)
    torch.mul(inner, weights[:, None], out=gradient)
    return by_gate, by_up, by_weights
