"""Mixtral and Qwen3-MoE: a router and experts in every block, or in some."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.dense_blocks import read_dense, write_dense
from bigplan.spec.hf.families.family import ModelFamily, Tensors
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

DENSE = ("gate_proj", "up_proj", "down_proj")
ROUTER_KEYS = LLAMA_KEYS | {
    "experts_per_token": ("num_experts_per_tok",),
    "router_loss": ("router_aux_loss_coef",),
}
DENSE_KEYS = {
    "dense_blocks": ("mlp_only_layers",),
    "expert_pattern": ("mlp_only_layers", "decoder_sparse_step"),
    "dense_ffn": ("intermediate_size",),
}


def routed_tensors(
    module: str, matrices: tuple[str, str, str] = DENSE, *, dense: bool = True
) -> Tensors:
    """Llama's, with a router and experts beside the MLP or, not `dense`, in place of it.

    `matrices`: gate, up and down.
    """
    within = f"model.layers.{{}}.{module}"
    names = LLAMA_TENSORS.names.items()
    others = {name: place for name, place in names if dense or name not in DENSE}
    experts = {
        f"experts.{ours}": f"{within}.experts.{{expert}}.{theirs}"
        for ours, theirs in zip(DENSE, matrices, strict=True)
    }
    return Tensors({**others, "router": f"{within}.gate", **experts})


def read_router(reader: ConfigReader) -> dict[str, Any]:
    """How many experts a token passes, and the coefficient of their balance."""
    return {
        "experts_per_token": reader.count("num_experts_per_tok"),
        "router_loss": reader.get("router_aux_loss_coef"),
    }


def write_router(model: ModelSpec) -> dict[str, Any]:
    """The router's loss is added by transformers only where it gives the router's scores."""
    return {
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.router_loss,
        "output_router_logits": model.router_loss > 0,
    }


def _read_mixtral(reader: ConfigReader) -> dict[str, Any]:
    if reader.get("router_jitter_noise"):
        reader.refuse("router_jitter_noise", "0: routers read what experts read")
    return (
        read_llama_like(reader)
        | read_router(reader)
        | {
            "experts": reader.count("num_local_experts"),
            "sliding_window": reader.optional_count("sliding_window"),
        }
    )


def _write_mixtral(model: ModelSpec) -> dict[str, Any]:
    return (
        write_llama_like(model, "mixtral", "MixtralForCausalLM")
        | write_router(model)
        | {"num_local_experts": model.experts, "sliding_window": model.sliding_window}
    )


def _read_qwen3(reader: ConfigReader) -> dict[str, Any]:
    slides = reader.flag("use_sliding_window")
    if slides and reader.get("max_window_layers"):
        # transformers 4 slides from this block on, transformers 5 in all.
        reader.refuse("max_window_layers", "0, or use_sliding_window false")
    return (
        read_llama_like(reader)
        | read_router(reader)
        | read_dense(reader)
        | {
            "ffn": reader.count("moe_intermediate_size"),
            # transformers 5 writes one name, and 4 the other.
            "experts": reader.optional_count("num_local_experts") or reader.count("num_experts"),
            "router_normalised": reader.flag("norm_topk_prob"),
            **read_attention_bias(reader),
            "qk_norm": True,
            "sliding_window": reader.optional_count("sliding_window") if slides else None,
        }
    )


def _write_qwen3(model: ModelSpec) -> dict[str, Any]:
    return (
        write_llama_like(model, "qwen3_moe", "Qwen3MoeForCausalLM")
        | write_router(model)
        | write_dense(model)
        | {
            "moe_intermediate_size": model.ffn,
            "num_experts": model.experts,
            "norm_topk_prob": model.router_normalised,
            "attention_bias": model.qkv_bias,
            "use_sliding_window": model.sliding_window is not None,
            "sliding_window": model.sliding_window,
        }
    )


MIXTRAL = ModelFamily(
    _read_mixtral,
    LLAMA_DEFAULTS
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
    },
    _write_mixtral,
    routed_tensors("block_sparse_moe", ("w1", "w3", "w2"), dense=False),
    ROUTER_KEYS | {"experts": ("num_local_experts",)},
)
QWEN3_MOE = ModelFamily(
    _read_qwen3,
    LLAMA_DEFAULTS
    | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 0,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    _write_qwen3,
    routed_tensors("mlp"),
    ROUTER_KEYS
    | {
        "experts": ("num_experts", "num_local_experts"),
        "ffn": ("moe_intermediate_size",),
        "router_normalised": ("norm_topk_prob",),
        **DENSE_KEYS,
    },
)
