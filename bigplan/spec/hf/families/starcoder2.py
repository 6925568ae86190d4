"""StarCoder2: a Llama with LayerNorm and biases, whose MLP is GELU between two matrices."""

from __future__ import annotations

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS
from bigplan.spec.hf.families.llama import (
    BIAS,
    LLAMA_BUT_MLP,
    LLAMA_TENSORS,
    OF_RMSNORM,
    WINDOW,
)
from bigplan.spec.hf.families.parts import activation, always, values, written

STARCODER2 = LLAMA_BUT_MLP.like(
    "starcoder2",
    "Starcoder2ForCausalLM",
    {
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "tie_word_embeddings": True,
        "sliding_window": None,
    },
    activation("hidden_act", GELUS, "gelu_pytorch_tanh"),
    always(norm="layernorm"),
    values(norm_epsilon="norm_epsilon"),
    BIAS,
    WINDOW,
    written({"residual_dropout": 0.0, "embedding_dropout": 0.0, **NO_TOKENS}),
    tensors=LLAMA_TENSORS.but(
        {"up_proj": "model.layers.{}.mlp.c_fc", "down_proj": "model.layers.{}.mlp.c_proj"},
        without=("gate_proj",),
    ),
    without=OF_RMSNORM,
)
