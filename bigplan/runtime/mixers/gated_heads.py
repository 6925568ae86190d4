"""The gate of attention's values, of each column, as in Qwen3-Next."""

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
    """Attention's values [b, s, heads * d] times the sigmoid of a gate [..., heads * d].

    The sigmoid is kept in place of the gate, and the result may be made again.
    """
    share = gate.sigmoid().view(mixed.shape)
    gated = mixed * share
    forget(gated, torch.mul, mixed, share)
    return gated
