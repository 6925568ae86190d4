"""Falcon, whose queries, keys and values are one matrix, key head by key head.

Falcon 7B has one key head. It and Falcon 2 11B give attention and MLP one norm together, Falcon 40B
and 180B a norm each. Refused by name: Falcon-RW, which scales ALiBi's biases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, Tensors, family
from bigplan.spec.hf.families.llama import ROPE
from bigplan.spec.hf.families.parts import (
    Part,
    activation,
    always,
    counts,
    flags,
    inner_width,
    off,
    on,
    values,
    written,
)
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


def _read_variant(reader: ConfigReader) -> dict[str, Any]:
    """Key heads, and whether attention and MLP have one norm."""
    heads = reader.count("num_attention_heads")
    if not reader.flag("new_decoder_architecture"):
        return {"kv_heads": 1 if reader.flag("multi_query") else heads, "shared_norm": True}
    norms = reader.optional_count("num_ln_in_parallel_attn") or 2
    if norms > 2:
        reader.refuse("num_ln_in_parallel_attn", "1 or 2")
    key_heads = reader.optional_count("num_kv_heads") or heads
    return {"kv_heads": key_heads, "shared_norm": norms == 1}


def _write_variant(model: ModelSpec) -> dict[str, Any]:
    return {
        "num_kv_heads": model.kv_heads,
        "num_ln_in_parallel_attn": 1 if model.shared_norm else 2,
        "new_decoder_architecture": True,
    }


_FALCON = family(
    "falcon",
    "FalconForCausalLM",
    {
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
    },
    activation("activation", GELUS, "gelu_new"),
    off("alibi", "false: Falcon scales these biases, BLOOM's ALiBi does not"),
    on("parallel_attn", "true: attention and MLP read the same input"),
    counts(
        layers="num_hidden_layers",
        hidden="hidden_size",
        heads="num_attention_heads",
        vocab="vocab_size",
        max_sequence_length="max_position_embeddings",
    ),
    inner_width("ffn_hidden_size", "hidden_size"),
    Part(_read_variant, _write_variant, {"kv_heads": ("num_kv_heads",)}),
    values(norm_epsilon="layer_norm_epsilon"),
    always(norm="layernorm", positions="rope", parallel_residual=True),
    ROPE,
    flags(qkv_bias="bias", attention_output_bias="bias", mlp_bias="bias"),
    flags(tied_embeddings="tie_word_embeddings"),
    written({"alibi": False, "attention_dropout": 0.0, "hidden_dropout": 0.0, **NO_TOKENS}),
    tensors=_TENSORS,
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    """`n_embed` is an older name, which counts where both are there."""
    old = "n_embed" in reader.config
    return _FALCON.read(reader.saying({"hidden_size": reader.get("n_embed")}) if old else reader)


_KEYS = {**_FALCON.keys, "hidden": ("hidden_size", "n_embed")}
FALCON = replace(_FALCON, read=_read, keys=_KEYS)
