"""AFMoE (Arcee Trinity): norms before and after attention and experts, and gated attention.

Rope turns nothing in global blocks. The norm after experts is of their sum with the shared ones.
"""

from __future__ import annotations

from dataclasses import replace
from math import isclose, sqrt
from typing import Any

from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.layer_types import read_layer_types, write_layer_types
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.families.shared_experts import (
    DEEPSEEK_KEYS,
    DEEPSEEK_TENSORS,
    read_deepseek_experts,
    write_deepseek_experts,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import ROUTER_BIAS
from bigplan.spec.model import ModelSpec

# DeepSeek-V3's keys, and what they are called here.
_NAMED = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
    "routed_scaling_factor": "route_scale",
}
# What transformers' code does not read: it chooses among all experts, and weights sum to 1.
_FIXED = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.flag("attention_bias"):
        reader.refuse("attention_bias", "false")
    for key in ("n_group", "topk_group"):
        if reader.get(key) not in (None, 1):
            reader.refuse(key, "1: a token chooses among all experts")
    every, blocks = reader.count("global_attn_every_n_layers"), reader.count("num_hidden_layers")
    windows = read_layer_types(reader, [number % every > 0 for number in range(1, blocks + 1)])
    turned = windows["sliding_window"] is not None and "attention_pattern" not in windows
    told = {theirs: reader.get(ours) for theirs, ours in _NAMED.items()} | _FIXED
    fields = read_llama_like(reader)
    return (
        fields
        | read_deepseek_experts(replace(reader, config={**reader.config, **told}))
        | windows
        | {
            "norms": "around",
            "qk_norm": True,
            "attention_gate": True,
            "global_rope": turned,
            "embedding_scale": sqrt(fields["hidden"]) if reader.flag("mup_enabled") else 1.0,
        }
    )


def _write(model: ModelSpec) -> dict[str, Any]:
    experts = write_deepseek_experts(model)
    return (
        write_llama_like(model, "afmoe", "AfmoeForCausalLM")
        | {_NAMED.get(key, key): value for key, value in experts.items() if key not in _FIXED}
        | {
            "layer_types": write_layer_types(model),
            "sliding_window": model.sliding_window,
            "mup_enabled": isclose(model.embedding_scale, sqrt(model.hidden)),
            "attention_bias": False,
        }
    )


_MLP = "model.layers.{}.mlp"
_NAMES = {
    "q_gate_proj": "model.layers.{}.self_attn.gate_proj",
    "attention_closing_norm": "model.layers.{}.post_attention_layernorm",
    "post_norm": "model.layers.{}.pre_mlp_layernorm",
    "mlp_closing_norm": "model.layers.{}.post_mlp_layernorm",
    "router": f"{_MLP}.router.gate",
    ROUTER_BIAS: f"{_MLP}.expert_bias",
}
AFMOE = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | {
        "vocab_size": 200192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 32,
        "num_dense_layers": 1,
        "num_attention_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "route_scale": 1.0,
        "global_attn_every_n_layers": 4,
        "sliding_window": 1024,
        "mup_enabled": False,
        "n_group": 1,
        "topk_group": 1,
    },
    _write,
    replace(DEEPSEEK_TENSORS, names={**DEEPSEEK_TENSORS.names, **_NAMES}),
    {
        **LLAMA_KEYS,
        **DEEPSEEK_KEYS,
        "experts": ("num_experts",),
        "shared_ffn": ("num_shared_experts",),
        "dense_blocks": ("num_dense_layers",),
        "routing.scale": ("route_scale",),
        "attention_pattern": ("layer_types", "global_attn_every_n_layers"),
        "embedding_scale": ("mup_enabled",),
    },
)
