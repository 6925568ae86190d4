"""The gate of attention's values: of each column, as in Qwen3-Next, or of each head."""

from __future__ import annotations

import torch
from torch import Tensor

from bigplan.runtime.mixers.ways import Forget
from bigplan.spec.model import ModelSpec


def heads_of(model: ModelSpec) -> tuple[str, ...]:
    """Matrices whose products are queries, a gate if any, keys and, if they are no keys, values."""
    gate = ("q_gate_proj",) if model.attention_gate else ()
    return "q_proj", *gate, "k_proj", *(() if model.keys_as_values else ("v_proj",))


def gated_by(gate: Tensor, mixed: Tensor, forget: Forget) -> Tensor:
    """Attention's values [b, s, heads * d] times the sigmoid of a gate [..., heads * d or heads].

    The sigmoid is kept in place of the gate, and the result may be made again.
    """
    share = gate.sigmoid().view(*mixed.shape[:-1], -1)
    times = torch.mul if share.shape == mixed.shape else _times_heads
    gated = times(mixed, share)
    forget(gated, times, mixed, share)
    return gated


def _times_heads(mixed: Tensor, share: Tensor) -> Tensor:
    """Values [..., heads * d] times a number for each head [..., heads]."""
    heads = torch.unflatten(mixed, -1, (share.shape[-1], -1))
    return (heads * share.unsqueeze(-1)).flatten(-2)
