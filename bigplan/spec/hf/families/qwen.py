"""Qwen2, with biases of queries, keys and values, and Qwen3, with norms of queries and keys."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import ModelFamily
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
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _read_window(reader: ConfigReader) -> dict[str, Any]:
    """Qwen slides in layers from max_window_layers on, where it does not list them."""
    slides = reader.flag("use_sliding_window")
    first = reader.count("max_window_layers", least=0)
    blocks = range(reader.count("num_hidden_layers"))
    return read_layer_types(reader, [slides and number >= first for number in blocks])


def _write_window(model: ModelSpec) -> dict[str, Any]:
    slides = model.sliding_window is not None
    return {
        "use_sliding_window": slides,
        "sliding_window": model.sliding_window,
        "max_window_layers": 0 if slides else model.layers,
        "layer_types": write_layer_types(model),
    }


def _read_qwen2(reader: ConfigReader) -> dict[str, Any]:
    return read_llama_like(reader) | {"qkv_bias": True} | _read_window(reader)


def _write_qwen2(model: ModelSpec) -> dict[str, Any]:
    return write_llama_like(model, "qwen2", "Qwen2ForCausalLM") | _write_window(model)


def _read_qwen3(reader: ConfigReader) -> dict[str, Any]:
    return (
        read_llama_like(reader)
        | read_attention_bias(reader)
        | {"qk_norm": True}
        | _read_window(reader)
    )


def _write_qwen3(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "qwen3", "Qwen3ForCausalLM") | _write_window(model)
    return config | {"attention_bias": model.qkv_bias}


QWEN2 = ModelFamily(_read_qwen2, _DEFAULTS, _write_qwen2, LLAMA_TENSORS, LLAMA_KEYS)
QWEN3 = ModelFamily(
    _read_qwen3, _DEFAULTS | {"head_dim": 128}, _write_qwen3, LLAMA_TENSORS, LLAMA_KEYS
)
