"""Granite: a Llama with factors of embeddings, scores, residuals and logits."""

from __future__ import annotations

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
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    own = read_attention_bias(reader) | {"mlp_bias": reader.flag("mlp_bias")}
    return read_llama_like(reader) | own | read_factors(reader)


def read_factors(reader: ConfigReader) -> dict[str, Any]:
    """Logits are divided by their key; scores are multiplied, in place of 1 / root of head_dim."""
    return {
        "embedding_scale": reader.number("embedding_multiplier"),
        "residual_scale": reader.number("residual_multiplier"),
        "score_scale": reader.number("attention_multiplier"),
        "logit_scale": 1.0 / reader.number("logits_scaling"),
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    own = {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias, **NO_TOKENS}
    return write_llama_like(model, "granite", "GraniteForCausalLM") | own | write_factors(model)


def write_factors(model: ModelSpec) -> dict[str, Any]:
    """The same."""
    return {
        "embedding_multiplier": model.embedding_scale,
        "residual_multiplier": model.residual_scale,
        "attention_multiplier": model.scale_of_scores,
        "logits_scaling": 1.0 / model.logit_scale,
    }


GRANITE = ModelFamily(
    _read,
    _DEFAULTS,
    _write,
    LLAMA_TENSORS,
    LLAMA_KEYS
    | {
        "embedding_scale": ("embedding_multiplier",),
        "residual_scale": ("residual_multiplier",),
        "score_scale": ("attention_multiplier",),
        "logit_scale": ("logits_scaling",),
    },
)
