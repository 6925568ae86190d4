"""The activation of Llama 4's experts, whose inputs are weighed: by torch's operators.

The first products read rows as they are, since w x times a matrix is w times x times it. So the
activation is silu(w g) w u of gate g and up u of the row itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigplan.runtime.operators import gated, gated_backward


def weighted(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """silu(w gate) * w up of rows [rows, f] with a weight w each, fp32 [rows]."""
    each = weights[:, None].to(gate.dtype)
    return gated(gate * each, up).mul_(each)


def weighted_backward(
    gate: Tensor, up: Tensor, weights: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by gate, up and weights; weighted(gate, up, weights) goes to `gradient`."""
    each = weights[:, None].to(gate.dtype)
    by_gate, by_up = gated_backward(gate * each, up * each, gradient, out=gradient)
    by_weights = (by_gate * gate).addcmul_(by_up, up).sum(-1, dtype=torch.float32)
    return by_gate.mul_(each), by_up.mul_(each), by_weights
