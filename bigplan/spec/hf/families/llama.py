"""Llama and Mistral, and what Qwen has in common with them."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import Tensors, family
from bigplan.spec.hf.families.parts import (
    Part,
    activation,
    always,
    counts,
    flags,
    joined,
    optional_counts,
    values,
    written,
)
from bigplan.spec.hf.families.rope import ROPE_KEYS, read_rope, write_scaling
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

LLAMA_TENSORS = Tensors(
    {
        "embed_tokens": "model.embed_tokens",
        "input_norm": "model.layers.{}.input_layernorm",
        "q_proj": "model.layers.{}.self_attn.q_proj",
        "k_proj": "model.layers.{}.self_attn.k_proj",
        "v_proj": "model.layers.{}.self_attn.v_proj",
        "o_proj": "model.layers.{}.self_attn.o_proj",
        "q_norm": "model.layers.{}.self_attn.q_norm",
        "k_norm": "model.layers.{}.self_attn.k_norm",
        "post_norm": "model.layers.{}.post_attention_layernorm",
        "gate_proj": "model.layers.{}.mlp.gate_proj",
        "up_proj": "model.layers.{}.mlp.up_proj",
        "down_proj": "model.layers.{}.mlp.down_proj",
        "norm": "model.norm",
        "lm_head": "lm_head",
    }
)
# Of those that norm what attention and MLP give, and not what they read.
NORMS_AFTER = LLAMA_TENSORS.but(
    {
        "attention_closing_norm": "model.layers.{}.post_attention_layernorm",
        "mlp_closing_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    without=("input_norm", "post_norm"),
)
LLAMA_DEFAULTS: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def _read_heads(reader: ConfigReader) -> dict[str, Any]:
    heads, head_dim = reader.count("num_attention_heads"), reader.optional_count("head_dim")
    own = {"heads": heads, "kv_heads": reader.optional_count("num_key_value_heads") or heads}
    return own | ({"head_dim": head_dim} if head_dim is not None else {})


def _write_heads(model: ModelSpec) -> dict[str, Any]:
    return {
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
    }


def _write_rope(model: ModelSpec) -> dict[str, Any]:
    return {"rope_theta": model.rope_theta, "rope_scaling": write_scaling(model.rope_scaling)}


ROPE = Part(read_rope, _write_rope, ROPE_KEYS)
HEADS = Part(
    _read_heads,
    _write_heads,
    {"heads": ("num_attention_heads",), "kv_heads": ("num_key_value_heads",)},
)
# What Llama and its relatives share, and that but for the activation of their MLPs.
LLAMA_BUT_MLP = family(
    "llama",
    "LlamaForCausalLM",
    LLAMA_DEFAULTS,
    counts(
        layers="num_hidden_layers",
        hidden="hidden_size",
        ffn="intermediate_size",
        vocab="vocab_size",
        max_sequence_length="max_position_embeddings",
    ),
    HEADS,
    values(norm_epsilon="rms_norm_eps"),
    flags(tied_embeddings="tie_word_embeddings"),
    always(norm="rmsnorm", positions="rope"),
    ROPE,
    written({"attention_dropout": 0.0}),
    tensors=LLAMA_TENSORS,
)
LLAMA_LIKE = LLAMA_BUT_MLP.like(
    "llama",
    "LlamaForCausalLM",
    {},
    activation("hidden_act", {"silu": "swiglu", "swish": "swiglu"}, "silu"),
)
# One key says whether all products of attention have biases, or all of a block.
ATTENTION_BIAS = flags(attention_output_bias="attention_bias", qkv_bias="attention_bias")
BIAS = flags(mlp_bias="use_bias", attention_output_bias="use_bias", qkv_bias="use_bias")
MLP_BIAS = flags(mlp_bias="mlp_bias")
WINDOW = optional_counts(sliding_window="sliding_window")
# Layer norms in place of others, and the key that files with them do not have.
LAYER_NORM = joined(always(norm="layernorm"), values(norm_epsilon="layer_norm_eps"))
OF_RMSNORM = ("rms_norm_eps",)


LLAMA = LLAMA_LIKE.like(
    "llama",
    "LlamaForCausalLM",
    {"max_position_embeddings": 2048, "mlp_bias": False},
    ATTENTION_BIAS,
    MLP_BIAS,
)
MISTRAL = LLAMA_LIKE.like(
    "mistral",
    "MistralForCausalLM",
    {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    WINDOW,
)
