"""Seed-OSS: a Llama with biases of queries, keys and values, and heads of their own width."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    return read_llama_like(reader) | {
        "qkv_bias": reader.flag("attention_bias"),
        "attention_output_bias": reader.flag("attention_out_bias"),
        "mlp_bias": reader.flag("mlp_bias"),
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_llama_like(model, "seed_oss", "SeedOssForCausalLM") | {
        "attention_bias": model.qkv_bias,
        "attention_out_bias": model.attention_output_bias,
        "mlp_bias": model.mlp_bias,
        "residual_dropout": 0.0,
        **NO_TOKENS,
    }


SEED_OSS = ModelFamily(
    _read,
    _DEFAULTS,
    _write,
    LLAMA_TENSORS,
    LLAMA_KEYS
    | {"qkv_bias": ("attention_bias",), "attention_output_bias": ("attention_out_bias",)},
)
