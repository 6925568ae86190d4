"""Flint: sinks of attention, rope in blocks with a window alone, and experts beside a shared one.

Routers take sigmoids in fp32 and have no bias. transformers adds their loss where it is asked for
their scores alone (`output_router_logits`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.dense_blocks import read_dense, write_dense
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.layer_types import read_layer_types, write_layer_types
from bigplan.spec.hf.families.llama import read_attention_bias, read_llama_like, write_llama_like
from bigplan.spec.hf.families.shared_experts import QWEN2_MOE
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import SINKS
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.flag("output_router_logits") and reader.get("router_aux_loss_coef"):
        reader.refuse("router_aux_loss_coef", "0: a loss of routers balances a softmax")
    if reader.get("mlp_only_layers") is None:
        reader = replace(reader, config={**reader.config, "mlp_only_layers": [0, 1]})
    last = reader.count("num_hidden_layers") - 1
    windows = read_layer_types(
        reader, [number > 1 and number % 4 != 1 and number != last for number in range(last + 1)]
    )
    turned = windows["sliding_window"] is not None and "attention_pattern" not in windows
    return (
        read_llama_like(reader)
        | read_attention_bias(reader)
        | read_dense(reader)
        | windows
        | {
            "qk_norm": True,
            "attention_sinks": True,
            "global_rope": turned,
            "ffn": reader.count("moe_intermediate_size"),
            "shared_ffn": reader.count("shared_expert_intermediate_size"),
            "experts": reader.optional_count("num_local_experts") or reader.count("num_experts"),
            "experts_per_token": reader.count("num_experts_per_tok"),
            "router_normalised": reader.flag("norm_topk_prob"),
            "routing": {"scores": "sigmoid"},
        }
    )


def _write(model: ModelSpec) -> dict[str, Any]:
    return (
        write_llama_like(model, "flint", "FlintForCausalLM")
        | write_dense(model)
        | {
            "attention_bias": model.qkv_bias,
            "layer_types": write_layer_types(model),
            "sliding_window": model.sliding_window or FLINT.defaults["sliding_window"],
            "moe_intermediate_size": model.ffn,
            "shared_expert_intermediate_size": model.shared_ffn,
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "norm_topk_prob": model.router_normalised,
        }
    )


_TENSORS = QWEN2_MOE.tensors
FLINT = ModelFamily(
    _read,
    {
        **QWEN2_MOE.defaults,
        "vocab_size": 150144,
        "intermediate_size": 6144,
        "num_hidden_layers": 49,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "sliding_window": 513,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "num_experts": 256,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0005,
        "output_router_logits": False,
    },
    _write,
    replace(
        _TENSORS,
        names={**_TENSORS.names, SINKS: "model.layers.{}.self_attn.softmax_offset"},
    ),
    {
        **QWEN2_MOE.keys,
        "qkv_bias": ("attention_bias",),
        "attention_pattern": ("layer_types",),
    },
)
