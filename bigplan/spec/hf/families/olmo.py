"""OLMo, whose norms have no weights; OLMo 2 and 3, whose norms stand after attention and MLP."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.layer_types import (
    read_layer_types,
    read_ropes,
    write_layer_types,
    write_ropes,
)
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    NORMS_AFTER,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


_FIRST_EPSILON = 1e-5  # which its code has, and no key


def _read_first(reader: ConfigReader) -> dict[str, Any]:
    if reader.get("clip_qkv") is not None:
        reader.refuse("clip_qkv", "null: queries, keys and values are not clipped")
    return read_llama_like(reader) | {
        "norm": "layernorm",
        "norm_bias": False,
        "norm_epsilon": _FIRST_EPSILON,
        "weightless_norms": "all",
        **read_attention_bias(reader),
    }


def _write_first(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "olmo", "OlmoForCausalLM")
    for key in ("rms_norm_eps", "head_dim"):
        del config[key]
    return config | {"attention_bias": model.qkv_bias, "clip_qkv": None, **NO_TOKENS}


def _read(reader: ConfigReader) -> dict[str, Any]:
    return read_llama_like(reader) | {
        "norms": "after",
        "qk_norm": True,
        "qk_norm_whole": True,
        **read_attention_bias(reader),
    }


def _read_third(reader: ConfigReader) -> dict[str, Any]:
    """Angles of blocks with a window are not scaled; older files say so of all in one key."""
    blocks = range(1, reader.count("num_hidden_layers") + 1)
    fields = _read(reader) | read_layer_types(reader, [number % 4 > 0 for number in blocks])
    return read_ropes(reader, fields, fields["rope_theta"])


def _write(model: ModelSpec, model_type: str = "olmo2", number: int = 2) -> dict[str, Any]:
    return write_llama_like(model, model_type, f"Olmo{number}ForCausalLM") | {
        "attention_bias": model.qkv_bias,
        **NO_TOKENS,
    }


def _write_third(model: ModelSpec) -> dict[str, Any]:
    return write_ropes(_write(model, "olmo3", 3), model) | {
        "sliding_window": model.sliding_window,
        "layer_types": write_layer_types(model),
    }


OLMO = ModelFamily(
    _read_first,
    _DEFAULTS | {"clip_qkv": None},
    _write_first,
    LLAMA_TENSORS,
    {name: keys for name, keys in LLAMA_KEYS.items() if name != "norm_epsilon"},
)
OLMO2 = ModelFamily(_read, _DEFAULTS, _write, NORMS_AFTER, LLAMA_KEYS)
OLMO3 = ModelFamily(
    _read_third,
    _DEFAULTS | {"rope_theta": 500000.0, "sliding_window": 4096},
    _write_third,
    NORMS_AFTER,
    LLAMA_KEYS | {"attention_pattern": ("layer_types",)},
)
