"""Apertus: norms of queries and keys, and an MLP without a gate, whose activation is trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.families.rope import write_parameters
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec
from bigplan.spec.xielu import EDGE, NEGATIVE, POSITIVE, SLOPE


def _read(reader: ConfigReader) -> dict[str, Any]:
    own = read_attention_bias(reader) | {"qk_norm": True}
    return read_llama_like(reader, {"xielu": "xielu"}) | own


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "apertus", "ApertusForCausalLM") | {"hidden_act": "xielu"}
    return write_parameters(config) | {"attention_bias": model.qkv_bias, **NO_TOKENS}


_NUMBERS = {POSITIVE: "alpha_p", NEGATIVE: "alpha_n", SLOPE: "beta", EDGE: "eps"}
_NAMES = {name: place for name, place in LLAMA_TENSORS.names.items() if name != "gate_proj"}
APERTUS = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    _write,
    replace(
        LLAMA_TENSORS,
        names={
            **_NAMES,
            "input_norm": "model.layers.{}.attention_layernorm",
            "post_norm": "model.layers.{}.feedforward_layernorm",
            **{name: f"model.layers.{{}}.mlp.act_fn.{own}" for name, own in _NUMBERS.items()},
        },
        as_number=(SLOPE, EDGE),
    ),
    LLAMA_KEYS,
)
