"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one norm, a bias of the head."""

from __future__ import annotations

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS
from bigplan.spec.hf.families.llama import (
    LAYER_NORM,
    LLAMA_BUT_MLP,
    LLAMA_TENSORS,
    OF_RMSNORM,
)
from bigplan.spec.hf.families.parts import BIASES, activation, always, off, written
from bigplan.spec.hf.families.rope import PARTLY_TURNED

PHI = LLAMA_BUT_MLP.like(
    "phi",
    "PhiForCausalLM",
    {
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,  # which its files do not have
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
        "tie_word_embeddings": False,
    },
    off("qk_layernorm", "false: it is a layer norm with biases"),
    off("tie_word_embeddings", "false: the head has a bias"),
    activation("hidden_act", GELUS, "gelu_new"),
    LAYER_NORM,
    PARTLY_TURNED,
    BIASES,
    always(parallel_residual=True, shared_norm=True, head_bias=True),
    written({"resid_pdrop": 0.0, **NO_TOKENS}),
    tensors=LLAMA_TENSORS.but(
        {
            "o_proj": "model.layers.{}.self_attn.dense",
            "up_proj": "model.layers.{}.mlp.fc1",
            "down_proj": "model.layers.{}.mlp.fc2",
            "norm": "model.final_layernorm",
        },
        without=("post_norm", "gate_proj", "q_norm", "k_norm"),
    ),
    without=OF_RMSNORM,
)
