"""Falcon, whose queries, keys and values are one matrix, key head by key head.

Falcon 7B has one key head. It and Falcon 2 11B give attention and MLP one norm together, Falcon 40B
and 180B a norm each. Refused by name: Falcon-RW, which scales ALiBi's biases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.families.rope import ROPE_KEYS, read_rope, write_scaling
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_TENSORS = Tensors(
    {
        "embed_tokens": "transformer.word_embeddings",
        "input_norm": "transformer.h.{}.ln_attn",
        "q_proj": "transformer.h.{}.self_attention.query_key_value",
        "k_proj": "transformer.h.{}.self_attention.query_key_value",
        "v_proj": "transformer.h.{}.self_attention.query_key_value",
        "o_proj": "transformer.h.{}.self_attention.dense",
        "post_norm": "transformer.h.{}.ln_mlp",
        "up_proj": "transformer.h.{}.mlp.dense_h_to_4h",
        "down_proj": "transformer.h.{}.mlp.dense_4h_to_h",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    fused=(("q_proj", "k_proj", "v_proj"),),
    by_head=("q_proj", "k_proj", "v_proj"),
    with_shared_norm={"input_norm": "transformer.h.{}.input_layernorm"},
)
_KEYS = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size", "n_embed"),
    "ffn": ("ffn_hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_kv_heads",),
    "vocab": ("vocab_size",),
    "max_sequence_length": ("max_position_embeddings",),
    "norm_epsilon": ("layer_norm_epsilon",),
    **ROPE_KEYS,
}
_DEFAULTS = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_ln_in_parallel_attn": None,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "activation": "gelu",
    "alibi": False,
    "bias": False,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "tie_word_embeddings": True,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    if "n_embed" in reader.config:
        renamed = {**reader.config, "hidden_size": reader.config["n_embed"]}
        reader = replace(reader, config=renamed)
    if reader.text("activation") not in GELUS:
        reader.refuse("activation", ", ".join(GELUS))
    if reader.flag("alibi"):
        reader.refuse("alibi", "false: Falcon scales these biases, BLOOM's ALiBi does not")
    if not reader.flag("parallel_attn"):
        reader.refuse("parallel_attn", "true: attention and MLP read the same input")
    heads, hidden = reader.count("num_attention_heads"), reader.count("hidden_size")
    key_heads, norms = _variant(reader)
    bias = reader.flag("bias")
    return {
        "layers": reader.count("num_hidden_layers"),
        "hidden": hidden,
        "ffn": reader.optional_count("ffn_hidden_size") or 4 * hidden,
        "heads": heads,
        "kv_heads": key_heads,
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("max_position_embeddings"),
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_epsilon"),
        "mlp": GELUS[reader.text("activation")],
        "positions": "rope",
        **read_rope(reader),
        "parallel_residual": True,
        "shared_norm": norms == 1,
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
    }


def _variant(reader: ConfigReader) -> tuple[int, int]:
    """Key heads, and norms before attention and MLP."""
    heads = reader.count("num_attention_heads")
    if not reader.flag("new_decoder_architecture"):
        return (1 if reader.flag("multi_query") else heads), 1
    norms = reader.optional_count("num_ln_in_parallel_attn") or 2
    if norms > 2:
        reader.refuse("num_ln_in_parallel_attn", "1 or 2")
    return reader.optional_count("num_kv_heads") or heads, norms


def _write(model: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "activation": "gelu" if model.mlp == "gelu" else "gelu_new",
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_kv_heads": model.kv_heads,
        "num_ln_in_parallel_attn": 1 if model.shared_norm else 2,
        "new_decoder_architecture": True,
        "alibi": False,
        "bias": model.mlp_bias,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_sequence_length,
        "layer_norm_epsilon": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_scaling": write_scaling(model.rope_scaling),
        "tie_word_embeddings": model.tied_embeddings,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **NO_TOKENS,
    }


FALCON = ModelFamily(_read, _DEFAULTS, _write, _TENSORS, _KEYS)
