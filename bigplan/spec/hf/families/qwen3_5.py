"""Qwen3.5's text models: Qwen3-Next's blocks with MLPs or experts, and files that name them so.

Its published models have a tower for pictures, too: beside_towers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bigplan.spec.delta_rule_steps import DECAYS, GATES, KEYS, QUERIES, RATES, VALUES
from bigplan.spec.hf.families.experts import DENSE, ROUTER_KEYS, read_router, write_router
from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.families.qwen3_next import (
    CONVOLVED,
    GATED,
    GATED_BY_HEAD,
    MIXER_DEFAULTS,
    MIXER_KEYS,
    MIXER_TENSORS,
    read_mixers,
    write_mixers,
)
from bigplan.spec.hf.families.shared_experts import QWEN2_MOE
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    if not reader.flag("attn_output_gate"):
        reader.refuse("attn_output_gate", "true: attention stands behind a gate")
    return (
        read_llama_like(reader)
        | read_attention_bias(reader)
        | read_mixers(reader)
        | {"norm_plus_one": True, "qk_norm": True, "attention_gate": True}
    )


def _write(model: ModelSpec) -> dict[str, Any]:
    return (
        write_llama_like(model, "qwen3_5_text", "Qwen3_5ForCausalLM")
        | write_mixers(model)
        | {
            "partial_rotary_factor": model.rotary_fraction,
            "attention_bias": model.qkv_bias,
            **NO_TOKENS,
        }
    )


def _read_moe(reader: ConfigReader) -> dict[str, Any]:
    if reader.get("mlp_only_layers"):
        reader.refuse("mlp_only_layers", "an empty list: all blocks have experts")
    width = {"intermediate_size": reader.count("moe_intermediate_size")}
    each = replace(reader, defaults={**reader.defaults, **width})
    return (
        _read(each)
        | read_router(reader)
        | {
            "ffn": reader.count("moe_intermediate_size"),
            "experts": reader.optional_count("num_local_experts") or reader.count("num_experts"),
            "router_normalised": True,
            "shared_ffn": reader.count("shared_expert_intermediate_size"),
            "shared_gate": True,
        }
    )


def _write_moe(model: ModelSpec) -> dict[str, Any]:
    dense = {key: value for key, value in _write(model).items() if key != "intermediate_size"}
    return (
        dense
        | write_router(model)
        | {
            "model_type": "qwen3_5_moe_text",
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "moe_intermediate_size": model.ffn,
            "num_experts": model.experts,
            "shared_expert_intermediate_size": model.shared_ffn,
        }
    )


_WITHIN = "model.layers.{}.linear_attn"
_JOINED = (QUERIES, KEYS, VALUES)
_OWN = {
    **MIXER_TENSORS,
    **dict.fromkeys(_JOINED, f"{_WITHIN}.in_proj_qkv"),
    GATES: f"{_WITHIN}.in_proj_z",
    RATES: f"{_WITHIN}.in_proj_b",
    DECAYS: f"{_WITHIN}.in_proj_a",
}
_DEFAULTS = (
    LLAMA_DEFAULTS
    | MIXER_DEFAULTS
    | {
        "vocab_size": 248320,
        "num_attention_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "attn_output_gate": True,
    }
)


def _tensors(names: Mapping[str, str]) -> Tensors:
    return Tensors({**names, **_OWN}, fused=(GATED, _JOINED, CONVOLVED), grouped=GATED_BY_HEAD)


QWEN3_5 = ModelFamily(
    _read,
    _DEFAULTS
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    _write,
    _tensors(LLAMA_TENSORS.names),
    LLAMA_KEYS | MIXER_KEYS | {"qkv_bias": ("attention_bias",)},
)
QWEN3_5_MOE = ModelFamily(
    _read_moe,
    _DEFAULTS
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "router_aux_loss_coef": 0.001,
        "mlp_only_layers": None,
    },
    _write_moe,
    _tensors({n: place for n, place in QWEN2_MOE.tensors.names.items() if n not in DENSE}),
    ROUTER_KEYS
    | MIXER_KEYS
    | {
        "qkv_bias": ("attention_bias",),
        "experts": ("num_experts", "num_local_experts"),
        "ffn": ("moe_intermediate_size",),
        "shared_ffn": ("shared_expert_intermediate_size",),
    },
)
