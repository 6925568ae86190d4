"""The activation of Gemma 4's experts, gelu(gate) * up by gelu's tanh approximation, times a weight
for each row: by torch's operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigplan.runtime.operators import gated, gated_backward


def weighted(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """The activation of rows [rows, f] times a weight each, fp32 [rows]."""
    return gated(gate, up, "geglu").mul_(weights[:, None])


def weighted_backward(
    gate: Tensor, up: Tensor, weights: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by gate, up and weights; weighted(gate, up, weights) goes to `gradient`."""
    inner = gated(gate, up, "geglu")
    by_weights = (inner * gradient).sum(-1, dtype=torch.float32)
    by_gate, by_up = gated_backward(gate, up, gradient.mul_(weights[:, None]), kind="geglu")
    torch.mul(inner, weights[:, None], out=gradient)
    return by_gate, by_up, by_weights
