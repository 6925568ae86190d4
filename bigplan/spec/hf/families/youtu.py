"""Youtu-LLM: DeepSeek-V3's latent attention, without experts."""

from __future__ import annotations

from bigplan.spec.hf.families.deepseek import LATENT
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.parts import written

_OF_EXPERTS = ("router", "experts.", "shared.")
YOUTU = LATENT.like(
    "youtu",
    "YoutuForCausalLM",
    {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    written(NO_TOKENS),
    tensors=LATENT.tensors.but(
        {}, without=[name for name in LATENT.tensors.names if name.startswith(_OF_EXPERTS)]
    ),
)
