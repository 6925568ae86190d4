"""Hunyuan 3: norms of each head, and DeepSeek-V3's experts by keys and names of its own.

Layers that predict further tokens (`num_nextn_predict_layers`) are left out, as transformers does.
"""

from __future__ import annotations

from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.dense_blocks import mlp_types
from bigplan.spec.hf.families.experts import EACH, routed_tensors, shared_names
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE
from bigplan.spec.hf.families.parts import Part, always, counts, off
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    each = reader.count("moe_intermediate_size")
    scale = reader.number("router_scaling_factor")
    return {
        # transformers 5 writes one name, and files have the other.
        "experts": reader.optional_count("num_experts") or reader.count("num_local_experts"),
        "shared_ffn": each * reader.count("num_shared_experts"),
        "routing": {"scores": "sigmoid", "bias": True, "scale": scale},
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return {
        "num_experts": model.experts,
        "num_shared_experts": model.shared_ffn // max(1, model.ffn),
        "router_scaling_factor": model.routed_by.scale,
    }


_KEYS = {
    "experts": ("num_experts", "num_local_experts"),
    "shared_ffn": ("num_shared_experts",),
    "routing.scale": ("router_scaling_factor",),
}
_WITHIN = "model.layers.{}.mlp"
HY_V3 = LLAMA_LIKE.like(
    "hy_v3",
    "HYV3ForCausalLM",
    {
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
    off("mlp_bias"),
    ATTENTION_BIAS,
    always(qk_norm=True),
    EACH,
    counts(experts_per_token="num_experts_per_tok"),
    Part(_read, _write, _KEYS),
    mlp_types(lambda reader: 1),
    tensors=routed_tensors("mlp").but(
        {
            "router": f"{_WITHIN}.router.gate",
            ROUTER_BIAS: f"{_WITHIN}.expert_bias",
            **shared_names(f"{_WITHIN}.shared_mlp"),
        }
    ),
)
