"""nanochat: no norm has weights, one follows the token table, and queries and keys are normed."""

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

_SQUARED = {"relu2": "relu2"}


def _read(reader: ConfigReader) -> dict[str, Any]:
    return read_llama_like(reader, _SQUARED) | {
        "weightless_norms": "all",
        "embedding_norm": True,
        "qk_norm": True,
        "qk_norm_turned": True,
        "qkv_bias": reader.flag("attention_bias"),
        "attention_output_bias": reader.flag("attention_bias"),
        "logit_cap": reader.get("final_logit_softcapping"),
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "nanochat", "NanoChatForCausalLM")
    return config | {
        "hidden_act": "relu2",
        "attention_bias": model.qkv_bias,
        "final_logit_softcapping": model.logit_cap,
        **NO_TOKENS,
    }


_MLP = {"up_proj": "model.layers.{}.mlp.fc1", "down_proj": "model.layers.{}.mlp.fc2"}
NANOCHAT = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | {
        "vocab_size": 50304,
        "hidden_size": 768,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "max_position_embeddings": 2048,
        "hidden_act": "relu2",
        "final_logit_softcapping": 15.0,
    },
    _write,
    # Its rope turns by angles of the other sign.
    replace(LLAMA_TENSORS, names={**LLAMA_TENSORS.names, **_MLP}, swapped=("q_proj", "k_proj")),
    LLAMA_KEYS | {"logit_cap": ("final_logit_softcapping",), "qkv_bias": ("attention_bias",)},
)
