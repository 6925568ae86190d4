"""CWM, the Code World Model: a Llama most of whose blocks have a window."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.layer_types import read_layer_types, write_layer_types
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.families.rope import write_parameters
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_EVERY = 4  # blocks, of which the first sees all tokens, where a file does not list them


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Rope turns all blocks by the same angles."""
    if reader.flag("mlp_bias"):
        reader.refuse("mlp_bias", "false")
    otherwise = [block % _EVERY > 0 for block in range(reader.count("num_hidden_layers"))]
    return read_llama_like(reader) | read_layer_types(reader, otherwise)


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_parameters(write_llama_like(model, "cwm", "CwmForCausalLM")) | {
        "sliding_window": model.sliding_window,
        "layer_types": write_layer_types(model),
    }


CWM = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | {
        "vocab_size": 128256,
        "hidden_size": 6144,
        "intermediate_size": 21504,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "mlp_bias": False,
        "sliding_window": 8192,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    _write,
    LLAMA_TENSORS,
    LLAMA_KEYS | {"attention_pattern": ("layer_types",)},
)
