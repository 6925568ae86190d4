"""Kolibri 1: EXAONE 4's attention, norms before and after it and experts, one of them shared.

A router's correction bias is added to its scores before the sigmoid, where experts are chosen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.exaone import EXAONE4
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.layer_types import write_layer_types
from bigplan.spec.hf.families.shared_experts import DEEPSEEK_TENSORS
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import ROUTER_BIAS
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    types = [*reader.texts("layer_types")]
    if not types:
        blocks = range(1, reader.count("num_hidden_layers") + 1)
        types = ["sliding_attention" if block % 5 else "full_attention" for block in blocks]
    fields = EXAONE4.read(replace(reader, config={**reader.config, "layer_types": types}))
    return fields | {
        "norms": "around",
        "ffn": reader.count("moe_intermediate_size"),
        "shared_ffn": reader.count("shared_expert_intermediate_size"),
        # transformers 5 writes one name, and files have the other.
        "experts": reader.optional_count("num_local_experts") or reader.count("num_experts"),
        "experts_per_token": reader.count("num_experts_per_tok"),
        "router_normalised": reader.flag("norm_topk_prob"),
        "routing": {"scores": "sigmoid", "bias": True, "bias_of": "scores"},
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    config = EXAONE4.write(model) | {
        "model_type": "kolibri1",
        "architectures": ["Kolibri1ForCausalLM"],
        "layer_types": write_layer_types(model),
        "moe_intermediate_size": model.ffn,
        "shared_expert_intermediate_size": model.shared_ffn,
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.router_normalised,
    }
    others = ("intermediate_size", "sliding_window_pattern")  # which its files do not have
    return {key: value for key, value in config.items() if key not in others}


_BLOCK = "model.layers.{}"
_NAMES = {
    "attention_closing_norm": f"{_BLOCK}.post_attn_norm",
    "mlp_closing_norm": f"{_BLOCK}.post_ffn_norm",
    ROUTER_BIAS: f"{_BLOCK}.moe.router.expert_bias",
}
KOLIBRI1 = ModelFamily(
    _read,
    {
        **EXAONE4.defaults,
        "vocab_size": 128000,
        "hidden_size": 2560,
        "num_hidden_layers": 50,
        "num_attention_heads": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "sliding_window": 513,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 6,
        "num_experts": 384,
        "norm_topk_prob": False,
    },
    _write,
    replace(DEEPSEEK_TENSORS, names={**DEEPSEEK_TENSORS.names, **_NAMES}),
    {
        **EXAONE4.keys,
        "experts": ("num_experts", "num_local_experts"),
        "experts_per_token": ("num_experts_per_tok",),
        "ffn": ("moe_intermediate_size",),
        "shared_ffn": ("shared_expert_intermediate_size",),
        "router_normalised": ("norm_topk_prob",),
    },
)
