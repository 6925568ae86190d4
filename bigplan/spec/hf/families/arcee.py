"""Arcee and Nemotron, whose MLP is a squared ReLU between two matrices, and Jais 2, which has
Nemotron's MLP, plain layer norms, and biases everywhere.
"""

from __future__ import annotations

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import (
    ATTENTION_BIAS,
    LAYER_NORM,
    LLAMA_BUT_MLP,
    LLAMA_TENSORS,
    MLP_BIAS,
    OF_RMSNORM,
)
from bigplan.spec.hf.families.parts import activation, always, values, written
from bigplan.spec.hf.families.rope import PARTLY_TURNED

SQUARED = activation("hidden_act", {"relu2": "relu2"}, "relu2")
ARCEE = LLAMA_BUT_MLP.like(
    "arcee",
    "ArceeForCausalLM",
    {
        "vocab_size": 32000,
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "relu2",
        "mlp_bias": False,
    },
    SQUARED,
    ATTENTION_BIAS,
    MLP_BIAS,
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but({}, without=("gate_proj",)),
)
NEMOTRON = ARCEE.like(
    "nemotron",
    "NemotronForCausalLM",
    {
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    values(norm_epsilon="norm_eps"),
    always(norm="layernorm", norm_plus_one=True),
    PARTLY_TURNED,
    without=OF_RMSNORM,
)
JAIS2 = ARCEE.like(
    "jais2",
    "Jais2ForCausalLM",
    {
        "vocab_size": 150272,
        "hidden_size": 3328,
        "intermediate_size": 26624,
        "num_attention_heads": 26,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    LAYER_NORM,
    without=OF_RMSNORM,
)
