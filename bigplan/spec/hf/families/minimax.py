"""MiniMax-M2: experts behind routers by sigmoids, and a part of every head's columns turned.

Layers that predict further tokens (`num_mtp_modules`) are left out, as transformers does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.experts import routed_tensors
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import ROUTER_BIAS
from bigplan.spec.model import ModelSpec

_MODULE = "block_sparse_moe"
# What the published files say beside transformers' keys, which their class always does.
_ALWAYS = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "router_jitter_noise": 0.0,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    """The loss that balances softmaxes has no meaning for sigmoids; transformers adds it anyway."""
    for key, value in _ALWAYS.items():
        if reader.get(key) != value:
            reader.refuse(key, str(value))
    fields = read_llama_like(reader)
    columns = reader.optional_count("rotary_dim")
    if columns is not None:
        width = fields.get("head_dim") or fields["hidden"] // fields["heads"]
        fields["rotary_fraction"] = columns / width
    return fields | {
        "experts": reader.count("num_local_experts"),
        "experts_per_token": reader.count("num_experts_per_tok"),
        "routing": {"scores": "sigmoid", "bias": True},
        "qk_norm": True,
        "qk_norm_whole": True,
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return (
        write_llama_like(model, "minimax_m2", "MiniMaxM2ForCausalLM")
        | _ALWAYS
        | {
            "num_local_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "rotary_dim": round(model.head_dim * model.rotary_fraction),
            # transformers' defaults would be tokens that a small vocabulary lacks
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
    )


_ROUTED = routed_tensors(_MODULE, ("w1", "w3", "w2"), dense=False)
MINIMAX_M2 = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | _ALWAYS
    | {
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "router_aux_loss_coef": 0.0,
        "shared_moe_mode": "sigmoid",
        "rotary_dim": None,
    },
    _write,
    replace(
        _ROUTED,
        names={
            **_ROUTED.names,
            ROUTER_BIAS: f"model.layers.{{}}.{_MODULE}.e_score_correction_bias",
        },
    ),
    LLAMA_KEYS
    | {"experts": ("num_local_experts",), "experts_per_token": ("num_experts_per_tok",)}
    | {"rotary_fraction": ("rotary_dim", "partial_rotary_factor")},
)
