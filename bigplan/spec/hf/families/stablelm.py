"""StableLM: a Llama with LayerNorm, whose rope turns a quarter of each head."""

from __future__ import annotations

from bigplan.spec.hf.families.llama import LAYER_NORM, LLAMA_LIKE, OF_RMSNORM
from bigplan.spec.hf.families.parts import flags, off, written
from bigplan.spec.hf.families.rope import PARTLY_TURNED

STABLELM = LLAMA_LIKE.like(
    "stablelm",
    "StableLmForCausalLM",
    {
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    off("qk_layernorm", "false: its LayerNorm has weights of its own for each head"),
    off("use_parallel_residual", "false: attention and MLP would share one norm"),
    LAYER_NORM,
    PARTLY_TURNED,
    flags(qkv_bias="use_qkv_bias"),
    written({"hidden_dropout": 0.0}),
    without=OF_RMSNORM,
)
