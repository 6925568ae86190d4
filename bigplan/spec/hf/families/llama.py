"""Llama and Mistral, and what Qwen has in common with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import ModelFamily, Tensors
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
_CLOSING = {
    "attention_closing_norm": "model.layers.{}.post_attention_layernorm",
    "mlp_closing_norm": "model.layers.{}.post_feedforward_layernorm",
}
# Of those that norm what attention and MLP give, and not what they read.
NORMS_AFTER = replace(
    LLAMA_TENSORS,
    names={
        name: place
        for name, place in {**LLAMA_TENSORS.names, **_CLOSING}.items()
        if name not in ("input_norm", "post_norm")
    },
)
LLAMA_KEYS = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "vocab": ("vocab_size",),
    "max_sequence_length": ("max_position_embeddings",),
    "norm_epsilon": ("rms_norm_eps",),
    "tied_embeddings": ("tie_word_embeddings",),
    **ROPE_KEYS,
}
LLAMA_DEFAULTS: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}

_GATED = {"silu": "swiglu", "swish": "swiglu"}


def read_llama_like(
    reader: ConfigReader, activations: Mapping[str, str] = _GATED
) -> dict[str, Any]:
    """Fields that Llama and its relatives share; `activations`: ModelSpec.mlp by `hidden_act`."""
    activation = reader.text("hidden_act")
    if activation not in activations:
        reader.refuse("hidden_act", ", ".join(activations))
    heads, head_dim = reader.count("num_attention_heads"), reader.optional_count("head_dim")
    return ({"head_dim": head_dim} if head_dim is not None else {}) | {
        "layers": reader.count("num_hidden_layers"),
        "hidden": reader.count("hidden_size"),
        "ffn": reader.count("intermediate_size"),
        "heads": heads,
        "kv_heads": reader.optional_count("num_key_value_heads") or heads,
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("max_position_embeddings"),
        "norm": "rmsnorm",
        "norm_epsilon": reader.get("rms_norm_eps"),
        "mlp": activations[activation],
        "positions": "rope",
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        **read_rope(reader),
    }


def read_attention_bias(reader: ConfigReader) -> dict[str, Any]:
    """One key says whether all products of attention have biases."""
    return dict.fromkeys(("qkv_bias", "attention_output_bias"), reader.flag("attention_bias"))


def read_bias(reader: ConfigReader) -> dict[str, Any]:
    """One key says whether all products of a block have biases."""
    products = ("qkv_bias", "attention_output_bias", "mlp_bias")
    return dict.fromkeys(products, reader.flag("use_bias"))


def write_llama_like(model: ModelSpec, model_type: str, architecture: str) -> dict[str, Any]:
    """Keys that their config.json files share."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_scaling": write_scaling(model.rope_scaling),
        "tie_word_embeddings": model.tied_embeddings,
        "attention_dropout": 0.0,
    }


def _read_llama(reader: ConfigReader) -> dict[str, Any]:
    return read_llama_like(reader) | {
        **read_attention_bias(reader),
        "mlp_bias": reader.flag("mlp_bias"),
    }


def _write_llama(model: ModelSpec) -> dict[str, Any]:
    return write_llama_like(model, "llama", "LlamaForCausalLM") | {
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
    }


def _read_mistral(reader: ConfigReader) -> dict[str, Any]:
    return read_llama_like(reader) | {"sliding_window": reader.optional_count("sliding_window")}


def _write_mistral(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "mistral", "MistralForCausalLM")
    return config | {"sliding_window": model.sliding_window}


LLAMA = ModelFamily(
    _read_llama,
    LLAMA_DEFAULTS | {"max_position_embeddings": 2048, "mlp_bias": False},
    _write_llama,
    LLAMA_TENSORS,
    LLAMA_KEYS,
)
MISTRAL = ModelFamily(
    _read_mistral,
    LLAMA_DEFAULTS
    | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    _write_mistral,
    LLAMA_TENSORS,
    LLAMA_KEYS,
)
