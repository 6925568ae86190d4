"""Ministral: a Mistral some of whose blocks have a window."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.layer_types import read_layer_types, write_layer_types
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
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    slides = reader.optional_count("sliding_window") is not None
    otherwise = [slides] * reader.count("num_hidden_layers")
    return read_llama_like(reader) | read_layer_types(reader, otherwise)


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_llama_like(model, "ministral", "MinistralForCausalLM") | {
        "sliding_window": model.sliding_window,
        "layer_types": write_layer_types(model),
        **NO_TOKENS,
    }


MINISTRAL = ModelFamily(
    _read,
    _DEFAULTS,
    _write,
    LLAMA_TENSORS,
    LLAMA_KEYS | {"attention_pattern": ("layer_types",)},
)
