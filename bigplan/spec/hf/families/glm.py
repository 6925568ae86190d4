"""GLM-4: a Llama with biases, whose rope turns pairs side by side; later ones norm around."""

from __future__ import annotations

from dataclasses import replace
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
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    return read_llama_like(reader) | {"qkv_bias": reader.flag("attention_bias")}


def _read_around(reader: ConfigReader) -> dict[str, Any]:
    return _read(reader) | {"norms": "around"}


def _write(model: ModelSpec) -> dict[str, Any]:
    return _written(model, "glm", "GlmForCausalLM")


def _write_around(model: ModelSpec) -> dict[str, Any]:
    return _written(model, "glm4", "Glm4ForCausalLM")


def _written(model: ModelSpec, model_type: str, architecture: str) -> dict[str, Any]:
    return write_llama_like(model, model_type, architecture) | {
        "partial_rotary_factor": model.rotary_fraction,
        "attention_bias": model.qkv_bias,
        **NO_TOKENS,
    }


_FUSED = ("gate_proj", "up_proj")
_NAMES = {**LLAMA_TENSORS.names, **dict.fromkeys(_FUSED, "model.layers.{}.mlp.gate_up_proj")}
_AROUND = {
    "attention_closing_norm": "model.layers.{}.post_self_attn_layernorm",
    "mlp_closing_norm": "model.layers.{}.post_mlp_layernorm",
}
_TENSORS = replace(LLAMA_TENSORS, names=_NAMES, fused=(_FUSED,), paired=("q_proj", "k_proj"))
_KEYS = LLAMA_KEYS | {"qkv_bias": ("attention_bias",)}
GLM = ModelFamily(_read, _DEFAULTS, _write, _TENSORS, _KEYS)
GLM4 = ModelFamily(
    _read_around, _DEFAULTS, _write_around, replace(_TENSORS, names=_NAMES | _AROUND), _KEYS
)
