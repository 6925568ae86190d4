"""ERNIE 4.5 without experts: a Llama whose rope turns pairs side by side."""

from __future__ import annotations

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import BIAS, LLAMA_LIKE, LLAMA_TENSORS
from bigplan.spec.hf.families.parts import written

ERNIE = LLAMA_LIKE.like(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    {
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    BIAS,
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but({}, paired=("q_proj", "k_proj")),
)
