"""Hunyuan 3: norms of each head, and DeepSeek-V3's experts by keys and names of its own.

Layers that predict further tokens (`num_nextn_predict_layers`) are left out, as transformers does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.dense_blocks import by_types, dense_fields, first_ones, write_types
from bigplan.spec.hf.families.experts import DENSE, routed_tensors
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import ROUTER_BIAS
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.flag("mlp_bias"):
        reader.refuse("mlp_bias", "false")
    fields = read_llama_like(reader)
    dense = by_types(reader, first_ones(1, fields["layers"]))
    each = reader.count("moe_intermediate_size")
    return (
        fields
        | read_attention_bias(reader)
        | {
            "qk_norm": True,
            "ffn": each,
            "experts": reader.optional_count("num_experts") or reader.count("num_local_experts"),
            "experts_per_token": reader.count("num_experts_per_tok"),
            "shared_ffn": each * reader.count("num_shared_experts"),
            **dense_fields(reader, dense),
            "routing": {
                "scores": "sigmoid",
                "bias": True,
                "scale": reader.number("router_scaling_factor"),
            },
        }
    )


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_llama_like(model, "hy_v3", "HYV3ForCausalLM") | {
        "attention_bias": model.qkv_bias,
        "intermediate_size": model.dense_ffn or model.ffn,
        "moe_intermediate_size": model.ffn,
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "num_shared_experts": model.shared_ffn // max(1, model.ffn),
        "router_scaling_factor": model.routed_by.scale,
        "mlp_layer_types": write_types(model),
    }


_ROUTED, _WITHIN = routed_tensors("mlp"), "model.layers.{}.mlp"
_OWN = {
    "router": f"{_WITHIN}.router.gate",
    ROUTER_BIAS: f"{_WITHIN}.expert_bias",
    **{f"shared.{name}": f"{_WITHIN}.shared_mlp.{name}" for name in DENSE},
}
HY_V3 = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | {
        "vocab_size": 120832,
        "hidden_size": 4096,
        "intermediate_size": 13312,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "mlp_bias": False,
        "num_local_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "router_scaling_factor": 2.826,
        "enable_moe_fp32_combine": True,  # of the sum with shared experts, which is rounded here
        "mlp_layer_types": None,
    },
    _write,
    replace(_ROUTED, names={**_ROUTED.names, **_OWN}),
    LLAMA_KEYS
    | {
        "ffn": ("moe_intermediate_size",),
        "experts": ("num_experts", "num_local_experts"),
        "experts_per_token": ("num_experts_per_tok",),
        "shared_ffn": ("num_shared_experts",),
        "dense_blocks": ("mlp_layer_types",),
        "expert_pattern": ("mlp_layer_types",),
        "dense_ffn": ("intermediate_size",),
        "routing.scale": ("router_scaling_factor",),
        "qkv_bias": ("attention_bias",),
    },
)
