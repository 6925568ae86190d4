"""SmolLM3: a Llama some of whose blocks have no rope."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.layer_types import turned_blocks, write_turned
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
from bigplan.spec.pattern import compact

_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "use_sliding_window": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.flag("use_sliding_window"):
        reader.refuse("use_sliding_window", "false: blocks with windows would have no rope")
    return (
        read_llama_like(reader)
        | _read_pattern(reader)
        | read_attention_bias(reader)
        | {"mlp_bias": reader.flag("mlp_bias")}
    )


def _read_pattern(reader: ConfigReader) -> dict[str, Any]:
    """Blocks with rope are local ones without a window; `no_rope_layers` has a 1 for each."""
    turned = turned_blocks(reader)
    if all(turned):
        return {}
    return {"attention_pattern": compact(turned), "global_rope": False}


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_llama_like(model, "smollm3", "SmolLM3ForCausalLM") | {
        "no_rope_layers": write_turned(model),
        "use_sliding_window": False,
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        **NO_TOKENS,
    }


SMOLLM3 = ModelFamily(
    _read,
    _DEFAULTS,
    _write,
    LLAMA_TENSORS,
    LLAMA_KEYS | {"attention_pattern": ("no_rope_layers",)},
)
