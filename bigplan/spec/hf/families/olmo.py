"""OLMo 2 and OLMo 3, whose norms stand after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from bigplan.spec.hf.families.rope import read_scaling, write_scaling
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
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def _read(reader: ConfigReader) -> dict[str, Any]:
    bias = reader.flag("attention_bias")
    return read_llama_like(reader) | {
        "norms": "after",
        "qk_norm": True,
        "qk_norm_whole": True,
        "qkv_bias": bias,
        "attention_output_bias": bias,
    }


def _read_third(reader: ConfigReader) -> dict[str, Any]:
    """Angles of blocks with a window are not scaled; older files say so of all in one key."""
    blocks = range(1, reader.count("num_hidden_layers") + 1)
    fields = _read(reader) | read_layer_types(reader, [number % 4 > 0 for number in blocks])
    ropes = reader.mapping("rope_parameters")
    local, far = (ropes.get(name) for name in (_LOCAL, _GLOBAL))
    base = fields["rope_theta"]
    if isinstance(far, Mapping):
        fields["rope_theta"] = far.get("rope_theta", base)
        fields["rope_scaling"] = read_scaling(far, reader)
    if isinstance(local, Mapping):
        if local.get("rope_type", "default") != "default":
            reader.refuse("rope_parameters", f"rope_type default for {_LOCAL}")
        base = local.get("rope_theta", base)
    if "attention_pattern" in fields:
        return fields | {"local_rope_theta": base}
    if fields["sliding_window"] is not None:
        fields |= {"rope_theta": base, "rope_scaling": None}
    return fields


def _write(model: ModelSpec, model_type: str = "olmo2", number: int = 2) -> dict[str, Any]:
    return write_llama_like(model, model_type, f"Olmo{number}ForCausalLM") | {
        "attention_bias": model.qkv_bias,
        # transformers' defaults would be tokens that a small vocabulary lacks
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _write_third(model: ModelSpec) -> dict[str, Any]:
    config = _write(model, "olmo3", 3)
    del config["rope_theta"], config["rope_scaling"]
    scaling = write_scaling(model.rope_scaling) or {"rope_type": "default"}
    local = model.local_rope_theta or model.rope_theta
    return config | {
        "sliding_window": model.sliding_window,
        "layer_types": write_layer_types(model),
        "rope_parameters": {
            _GLOBAL: {"rope_theta": model.rope_theta, **scaling},
            _LOCAL: {"rope_theta": local, "rope_type": "default"},
        },
    }


_OPENING = ("input_norm", "post_norm")
_NAMES = {name: there for name, there in LLAMA_TENSORS.names.items() if name not in _OPENING}
_CLOSING = {
    "attention_closing_norm": "model.layers.{}.post_attention_layernorm",
    "mlp_closing_norm": "model.layers.{}.post_feedforward_layernorm",
}
_TENSORS = replace(LLAMA_TENSORS, names=_NAMES | _CLOSING)
OLMO2 = ModelFamily(_read, _DEFAULTS, _write, _TENSORS, LLAMA_KEYS)
OLMO3 = ModelFamily(
    _read_third,
    _DEFAULTS | {"rope_theta": 500000.0, "sliding_window": 4096},
    _write_third,
    _TENSORS,
    LLAMA_KEYS | {"attention_pattern": ("layer_types",)},
)
