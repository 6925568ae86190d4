"""OLMoE and FlexOlmo: experts behind norms of queries and keys over all heads together.

FlexOlmo's norms of the residual stream stand after attention and experts, as OLMo 2's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.experts import (
    DENSE,
    ROUTER_KEYS,
    read_router,
    routed_tensors,
    write_router,
)
from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    NORMS_AFTER,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.get("clip_qkv") is not None:
        reader.refuse("clip_qkv", "null: queries, keys and values as they are")
    return _read_unclipped(reader)


def _read_unclipped(reader: ConfigReader) -> dict[str, Any]:
    return (
        read_llama_like(reader)
        | read_router(reader)
        | {
            "experts": reader.optional_count("num_local_experts") or reader.count("num_experts"),
            "router_normalised": reader.flag("norm_topk_prob"),
            "qk_norm": True,
            "qk_norm_whole": True,
            **read_attention_bias(reader),
        }
    )


def _read_flex(reader: ConfigReader) -> dict[str, Any]:
    return _read_unclipped(reader) | {"norms": "after"}


def _write(
    model: ModelSpec, model_type: str = "olmoe", architecture: str = "OlmoeForCausalLM"
) -> dict[str, Any]:
    return (
        write_llama_like(model, model_type, architecture)
        | write_router(model)
        | {
            "num_experts": model.experts,
            "norm_topk_prob": model.router_normalised,
            "attention_bias": model.qkv_bias,
            **NO_TOKENS,
        }
    )


def _write_flex(model: ModelSpec) -> dict[str, Any]:
    return _write(model, "flex_olmo", "FlexOlmoForCausalLM")


_KEYS = ROUTER_KEYS | {
    "experts": ("num_experts", "num_local_experts"),
    "router_normalised": ("norm_topk_prob",),
    "qkv_bias": ("attention_bias",),
}
_TENSORS = routed_tensors("mlp", dense=False)
_BEHIND = {
    name: place
    for name, place in {**_TENSORS.names, **NORMS_AFTER.names}.items()
    if name not in ("input_norm", "post_norm", *DENSE)
}

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
    _TENSORS,
    _KEYS,
)
FLEX_OLMO = ModelFamily(
    _read_flex,
    LLAMA_DEFAULTS
    | {
        "vocab_size": 100352,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "num_experts_per_tok": 5,
        "num_experts": 7,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
    },
    _write_flex,
    replace(_TENSORS, names=_BEHIND),
    _KEYS,
)
