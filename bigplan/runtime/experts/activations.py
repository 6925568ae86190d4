"""Activations of experts' rows, each row times its weight, by torch's operators.

A kernel does the same in one pass (kernels/handwritten/weighted_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.runtime.operators import GateKind, gated, gated_backward
from bigplan.spec.clamped import ALPHA, LIMIT


class Activation(NamedTuple):
    """Of rows [rows, f] of gate and up, with a weight each, fp32 [rows]; gate may be None."""

    forward: Callable[[Tensor | None, Tensor, Tensor], Tensor]
    # Gradients by gate, up and weights, of that by the result, over which the result is written.
    backward: Callable[
        [Tensor | None, Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor, Tensor]
    ]


def plain_activation(kind: str, weighs: str) -> Activation:
    """That of a model's `mlp`, by what weights weigh: what experts give, or read."""
    if weighs == "inputs":
        return Activation(_of_inputs, _of_inputs_backward)
    if kind == "clamped_swiglu":
        return Activation(_clamped, _clamped_backward)
    if kind == "relu2":
        return Activation(_squared, _squared_backward)
    gate: GateKind = "geglu" if kind == "geglu" else "swiglu"
    return Activation(partial(_gated, kind=gate), partial(_gated_backward, kind=gate))


def _gated(gate: Tensor | None, up: Tensor, weights: Tensor, *, kind: GateKind) -> Tensor:
    """f(gate) * up * weight, f being silu, or gelu by its tanh approximation."""
    assert gate is not None
    return gated(gate, up, kind).mul_(weights[:, None])


def _gated_backward(
    gate: Tensor | None, up: Tensor, weights: Tensor, gradient: Tensor, *, kind: GateKind
) -> tuple[Tensor, Tensor, Tensor]:
    assert gate is not None
    inner = gated(gate, up, kind)
    by_weights = (inner * gradient).sum(-1, dtype=torch.float32)
    by_gate, by_up = gated_backward(gate, up, gradient.mul_(weights[:, None]), kind=kind)
    torch.mul(inner, weights[:, None], out=gradient)
    return by_gate, by_up, by_weights


def _of_inputs(gate: Tensor | None, up: Tensor, weights: Tensor) -> Tensor:
    """silu(w gate) * w up, as in Llama 4, whose experts read w times a row.

    The first products read rows as they are: w x times a matrix is w times x times it. All in the
    order of the backward, which makes it again, so that both have the same bits.
    """
    assert gate is not None
    each = weights[:, None].to(gate.dtype)
    return gated(gate * each, up * each)


def _of_inputs_backward(
    gate: Tensor | None, up: Tensor, weights: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    assert gate is not None
    each = weights[:, None].to(gate.dtype)
    by_gate, by_up = gated_backward(gate * each, up * each, gradient, out=gradient)
    by_weights = (by_gate * gate).addcmul_(by_up, up).sum(-1, dtype=torch.float32)
    return by_gate.mul_(each), by_up.mul_(each), by_weights


def _squared(gate: Tensor | None, up: Tensor, weights: Tensor) -> Tensor:
    """The square of relu (So et al., arXiv 2109.08668), as in Nemotron 3, without a gate."""
    assert gate is None, "of gated experts"
    return F.relu(up).square_().mul_(weights[:, None])


def _squared_backward(
    gate: Tensor | None, up: Tensor, weights: Tensor, gradient: Tensor
) -> tuple[None, Tensor, Tensor]:
    assert gate is None, "of gated experts"
    opened = F.relu(up)
    inner = opened.square()
    by_weights = (inner * gradient).sum(-1, dtype=torch.float32)
    by_up = opened.mul_(2.0).mul_(gradient.mul_(weights[:, None]))
    torch.mul(inner, weights[:, None], out=gradient)
    return None, by_up, by_weights


def _clamped(gate: Tensor | None, up: Tensor, weights: Tensor) -> Tensor:
    """(u + 1) g sigmoid(1.702 g) of the gate up to 7 and up within 7 of zero, as in GPT-OSS."""
    assert gate is not None
    gate = gate.clamp(max=LIMIT)
    opened = (gate * ALPHA).sigmoid_().mul_(gate)
    return up.clamp(-LIMIT, LIMIT).add_(1.0).mul_(opened).mul_(weights[:, None])


def _clamped_backward(
    gate: Tensor | None, up: Tensor, weights: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    assert gate is not None
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
