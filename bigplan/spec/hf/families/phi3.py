"""Phi-3: a Llama whose queries, keys and values are one matrix, and gate and up another."""

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

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_MATRICES = {
    **dict.fromkeys(_FUSED[0], "model.layers.{}.self_attn.qkv_proj"),
    **dict.fromkeys(_FUSED[1], "model.layers.{}.mlp.gate_up_proj"),
}
_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "sliding_window": None,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    return read_llama_like(reader) | {"sliding_window": reader.optional_count("sliding_window")}


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "phi3", "Phi3ForCausalLM")
    return config | {
        "sliding_window": model.sliding_window,
        "partial_rotary_factor": model.rotary_fraction,
        **NO_TOKENS,
    }


_TENSORS = replace(LLAMA_TENSORS, names={**LLAMA_TENSORS.names, **_MATRICES}, fused=_FUSED)
PHI3 = ModelFamily(_read, _DEFAULTS, _write, _TENSORS, LLAMA_KEYS)
