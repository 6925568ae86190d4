"""Ministral: a Mistral some of whose blocks have a window."""

from __future__ import annotations

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.layer_types import layer_types
from bigplan.spec.hf.families.llama import LLAMA_LIKE
from bigplan.spec.hf.families.parts import written

MINISTRAL = LLAMA_LIKE.like(
    "ministral",
    "MinistralForCausalLM",
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    layer_types(lambda reader, block: reader.optional_count("sliding_window") is not None),
    written(NO_TOKENS),
)
