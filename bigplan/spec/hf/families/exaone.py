"""EXAONE 4: norms after attention and MLP, and no rope in global blocks between local ones."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.layer_types import read_layer_types, write_layer_types
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    NORMS_AFTER,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Without a window rope turns all blocks; with one, only those that have it."""
    if reader.config.get("sliding_window", 0) is None:
        window: dict[str, Any] = {"sliding_window": None}
    else:
        window = _read_window(reader)
    return read_llama_like(reader) | {"norms": "after", "qk_norm": True} | window


def _read_window(reader: ConfigReader) -> dict[str, Any]:
    pattern, blocks = reader.get("sliding_window_pattern"), reader.count("num_hidden_layers")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        local = [pattern[block % len(pattern)] == "L" for block in range(blocks - 1)] + [False]
    else:
        every = reader.count("sliding_window_pattern")
        local = [number % every > 0 for number in range(1, blocks + 1)]
    fields = read_layer_types(reader, local)
    if fields["sliding_window"] is None:
        reader.refuse("sliding_window", "null where no block has a window: rope would turn none")
    return fields | ({"global_rope": False} if "attention_pattern" in fields else {})


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_llama_like(model, "exaone4", "Exaone4ForCausalLM") | {
        "sliding_window": model.sliding_window,
        "layer_types": write_layer_types(model),
        **NO_TOKENS,
    }


EXAONE4 = ModelFamily(
    _read,
    _DEFAULTS,
    _write,
    NORMS_AFTER,
    LLAMA_KEYS | {"attention_pattern": ("layer_types", "sliding_window_pattern")},
)
