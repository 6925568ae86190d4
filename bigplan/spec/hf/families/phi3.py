"""Phi-3: a Llama whose queries, keys and values are one matrix, and gate and up another."""

from __future__ import annotations

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import LLAMA_LIKE, LLAMA_TENSORS, WINDOW
from bigplan.spec.hf.families.parts import written
from bigplan.spec.hf.families.rope import PARTLY_TURNED

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
PHI3 = LLAMA_LIKE.like(
    "phi3",
    "Phi3ForCausalLM",
    {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "sliding_window": None,
    },
    WINDOW,
    PARTLY_TURNED,
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but(
        {
            **dict.fromkeys(_FUSED[0], "model.layers.{}.self_attn.qkv_proj"),
            **dict.fromkeys(_FUSED[1], "model.layers.{}.mlp.gate_up_proj"),
        },
        fused=_FUSED,
    ),
)
