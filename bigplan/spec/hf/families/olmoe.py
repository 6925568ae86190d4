"""OLMoE: experts behind norms of queries and keys over all heads together."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.experts import (
    ROUTER_KEYS,
    read_router,
    routed_tensors,
    write_router,
)
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.llama import LLAMA_DEFAULTS, read_llama_like, write_llama_like
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.get("clip_qkv") is not None:
        reader.refuse("clip_qkv", "null: queries, keys and values as they are")
    bias = reader.flag("attention_bias")
    return (
        read_llama_like(reader)
        | read_router(reader)
        | {
            "experts": reader.optional_count("num_local_experts") or reader.count("num_experts"),
            "router_normalised": reader.flag("norm_topk_prob"),
            "qk_norm": True,
            "qk_norm_whole": True,
            "qkv_bias": bias,
            "attention_output_bias": bias,
        }
    )


def _write(model: ModelSpec) -> dict[str, Any]:
    return (
        write_llama_like(model, "olmoe", "OlmoeForCausalLM")
        | write_router(model)
        | {
            "num_experts": model.experts,
            "norm_topk_prob": model.router_normalised,
            "attention_bias": model.qkv_bias,
            # transformers' defaults would be tokens that a small vocabulary lacks
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
    )


OLMOE = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "clip_qkv": None,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
    },
    _write,
    routed_tensors("mlp", dense=False),
    ROUTER_KEYS
    | {
        "experts": ("num_experts", "num_local_experts"),
        "router_normalised": ("norm_topk_prob",),
        "qkv_bias": ("attention_bias",),
    },
)
