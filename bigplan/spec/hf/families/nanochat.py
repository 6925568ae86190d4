"""nanochat: no norm has weights, one follows the token table, and queries and keys are normed."""

from __future__ import annotations

from bigplan.spec.hf.families.arcee import SQUARED
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_BUT_MLP, LLAMA_TENSORS
from bigplan.spec.hf.families.parts import always, values, written

NANOCHAT = LLAMA_BUT_MLP.like(
    "nanochat",
    "NanoChatForCausalLM",
    {
        "vocab_size": 50304,
        "hidden_size": 768,
        "intermediate_size": 8192,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "max_position_embeddings": 2048,
        "hidden_act": "relu2",
        "final_logit_softcapping": 15.0,
    },
    SQUARED,
    ATTENTION_BIAS,
    always(weightless_norms="all", embedding_norm=True, qk_norm=True, qk_norm_turned=True),
    values(logit_cap="final_logit_softcapping"),
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but(
        {"up_proj": "model.layers.{}.mlp.fc1", "down_proj": "model.layers.{}.mlp.fc2"},
        swapped=("q_proj", "k_proj"),  # its rope turns by angles of the other sign
    ),
)
