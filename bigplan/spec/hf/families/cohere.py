"""Cohere (Command R) and Cohere 2 (Command R7B): attention and MLP in parallel after one norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.layer_types import read_layer_types, write_layer_types
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "use_qk_norm": False,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.flag("use_qk_norm"):
        reader.refuse("use_qk_norm", "false: its LayerNorm has weights of its own for each head")
    return read_llama_like(reader) | {
        "norm": "layernorm",
        "norm_bias": False,
        "norm_epsilon": reader.get("layer_norm_eps"),
        "parallel_residual": True,
        "shared_norm": True,
        **read_attention_bias(reader),
        "logit_scale": reader.number("logit_scale"),
    }


def _read_second(reader: ConfigReader) -> dict[str, Any]:
    """Rope turns nothing in blocks without a window."""
    every = reader.count("sliding_window_pattern")
    blocks = range(1, reader.count("num_hidden_layers") + 1)
    fields = _read(reader) | read_layer_types(reader, [number % every > 0 for number in blocks])
    if fields["sliding_window"] is None:
        reader.refuse("sliding_window", "a number of tokens, and a block that has it")
    return fields | ({"global_rope": False} if "attention_pattern" in fields else {})


def _write(model: ModelSpec) -> dict[str, Any]:
    return _written(model, "cohere", "CohereForCausalLM")


def _written(model: ModelSpec, model_type: str, architecture: str) -> dict[str, Any]:
    config = write_llama_like(model, model_type, architecture)
    del config["rms_norm_eps"]
    return config | {
        "layer_norm_eps": model.norm_epsilon,
        "logit_scale": model.logit_scale,
        "attention_bias": model.qkv_bias,
        **NO_TOKENS,
    }


def _write_second(model: ModelSpec) -> dict[str, Any]:
    return _written(model, "cohere2", "Cohere2ForCausalLM") | {
        "sliding_window": model.sliding_window,
        "layer_types": write_layer_types(model),
    }


_TENSORS = replace(
    LLAMA_TENSORS,
    names={name: there for name, there in LLAMA_TENSORS.names.items() if name != "post_norm"},
    paired=("q_proj", "k_proj"),
)
_KEYS = LLAMA_KEYS | {
    "norm_epsilon": ("layer_norm_eps",),
    "qkv_bias": ("attention_bias",),
    "logit_scale": ("logit_scale",),
}
COHERE = ModelFamily(_read, _DEFAULTS | {"rope_theta": 500000.0}, _write, _TENSORS, _KEYS)
COHERE2 = ModelFamily(
    _read_second,
    _DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4},
    _write_second,
    _TENSORS,
    _KEYS | {"attention_pattern": ("layer_types", "sliding_window_pattern")},
)
