"""Seed-OSS: a Llama with biases of queries, keys and values, and heads of their own width."""

from __future__ import annotations

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import LLAMA_LIKE, MLP_BIAS
from bigplan.spec.hf.families.parts import flags, written

SEED_OSS = LLAMA_LIKE.like(
    "seed_oss",
    "SeedOssForCausalLM",
    {
        "vocab_size": 155136,
        "hidden_size": 4096,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
    flags(qkv_bias="attention_bias", attention_output_bias="attention_out_bias"),
    MLP_BIAS,
    written({"residual_dropout": 0.0, **NO_TOKENS}),
)
