"""Hunyuan's dense models: norms of queries and keys that rope has turned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.families.rope import PLACES
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 290943,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Files that scale angles dynamically by an `alpha` have another base, whatever the length."""
    fields = read_llama_like(reader)
    rope = next((found for place in PLACES if (found := reader.mapping(place))), {})
    alpha = rope.get("alpha")
    if (fields["rope_scaling"] or {}).get("name") == "dynamic" and alpha:
        width = fields.get("head_dim") or fields["hidden"] // fields["heads"]
        fields["rope_theta"] *= alpha ** (width / (width - 2))
        fields["rope_scaling"] = None
    return fields | read_attention_bias(reader) | {"qk_norm": True, "qk_norm_turned": True}


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_llama_like(model, "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM") | {
        "attention_bias": model.qkv_bias,
        **NO_TOKENS,
    }


_NORMS = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
_NAMES = {name: f"model.layers.{{}}.self_attn.{there}" for name, there in _NORMS.items()}
HUNYUAN = ModelFamily(
    _read,
    _DEFAULTS,
    _write,
    replace(LLAMA_TENSORS, names={**LLAMA_TENSORS.names, **_NAMES}),
    LLAMA_KEYS | {"qkv_bias": ("attention_bias",)},
)
