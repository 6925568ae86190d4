"""Granite: a Llama with factors of embeddings, scores, residuals and logits."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, MLP_BIAS
from bigplan.spec.hf.families.parts import Part, joined, numbers, written
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read_inner(reader: ConfigReader) -> dict[str, Any]:
    """Logits are divided by their key; scores are multiplied, in place of 1 / root of head_dim."""
    return {
        "score_scale": reader.number("attention_multiplier"),
        "logit_scale": 1.0 / reader.number("logits_scaling"),
    }


def _write_inner(model: ModelSpec) -> dict[str, Any]:
    return {
        "attention_multiplier": model.scale_of_scores,
        "logits_scaling": 1.0 / model.logit_scale,
    }


FACTORS = joined(
    numbers(embedding_scale="embedding_multiplier", residual_scale="residual_multiplier"),
    Part(
        _read_inner,
        _write_inner,
        {"score_scale": ("attention_multiplier",), "logit_scale": ("logits_scaling",)},
    ),
)
GRANITE = LLAMA_LIKE.like(
    "granite",
    "GraniteForCausalLM",
    {
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
    },
    ATTENTION_BIAS,
    MLP_BIAS,
    FACTORS,
    written(NO_TOKENS),
)
