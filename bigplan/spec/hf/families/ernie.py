"""ERNIE 4.5 without experts: a Llama whose rope turns pairs side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    return read_llama_like(reader) | read_bias(reader)


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_llama_like(model, "ernie4_5", "Ernie4_5ForCausalLM") | {
        "use_bias": model.qkv_bias,
        **NO_TOKENS,
    }


ERNIE = ModelFamily(
    _read,
    _DEFAULTS,
    _write,
    replace(LLAMA_TENSORS, paired=("q_proj", "k_proj")),
    LLAMA_KEYS | {"qkv_bias": ("use_bias",)},
)
