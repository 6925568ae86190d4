"""Mixtral and Qwen3-MoE: a router and experts in every block, or in some."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.dense_blocks import DENSE_BLOCKS
from bigplan.spec.hf.families.family import Tensors
from bigplan.spec.hf.families.llama import (
    ATTENTION_BIAS,
    LLAMA_LIKE,
    LLAMA_TENSORS,
    WINDOW,
)
from bigplan.spec.hf.families.parts import Part, always, counts, empty, flags, joined, values
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

DENSE = ("gate_proj", "up_proj", "down_proj")


FIRST = ("experts.gate_proj", "experts.up_proj")  # what experts' rows enter
LAST = "experts.down_proj"


def shared_names(module: str) -> dict[str, str]:
    """Of the MLP that all tokens pass beside experts."""
    return {f"shared.{name}": f"{module}.{name}" for name in DENSE}


def stacked_names(first: str, last: str, part: str = "weight") -> dict[str, str]:
    """Of a tensor with all experts' gates and ups, and of one with all that lead back."""
    return {**{f"{name}.{part}": first for name in FIRST}, f"{LAST}.{part}": last}


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


# How many experts a token passes, and the coefficient of their balance; transformers adds it only
# where it gives the router's scores.
ROUTER = joined(
    counts(experts_per_token="num_experts_per_tok"),
    values(router_loss="router_aux_loss_coef"),
    Part(write=lambda model: {"output_router_logits": model.router_loss > 0}),
)
# transformers 5 writes one name, and 4 the other.
EXPERTS = Part(
    lambda reader: {
        "experts": reader.optional_count("num_local_experts") or reader.count("num_experts")
    },
    lambda model: {"num_experts": model.experts},
    {"experts": ("num_experts", "num_local_experts")},
)
LOCAL_EXPERTS = counts(experts="num_local_experts")
EACH = counts(ffn="moe_intermediate_size")  # an expert's width
NORMALISED = flags(router_normalised="norm_topk_prob")


def _read_window(reader: ConfigReader) -> dict[str, Any]:
    slides = reader.flag("use_sliding_window")
    if slides and reader.get("max_window_layers"):
        # transformers 4 slides from this block on, transformers 5 in all.
        reader.refuse("max_window_layers", "0, or use_sliding_window false")
    return {"sliding_window": reader.optional_count("sliding_window") if slides else None}


def _write_window(model: ModelSpec) -> dict[str, Any]:
    window = model.sliding_window
    return {"use_sliding_window": window is not None, "sliding_window": window}


MIXTRAL = LLAMA_LIKE.like(
    "mixtral",
    "MixtralForCausalLM",
    {
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
    empty("router_jitter_noise", "0: routers read what experts read"),
    ROUTER,
    LOCAL_EXPERTS,
    WINDOW,
    tensors=routed_tensors("block_sparse_moe", ("w1", "w3", "w2"), dense=False),
)
QWEN3_MOE = LLAMA_LIKE.like(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {
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
    Part(_read_window, _write_window),
    ROUTER,
    DENSE_BLOCKS,
    EACH,
    EXPERTS,
    NORMALISED,
    ATTENTION_BIAS,
    always(qk_norm=True),
    tensors=routed_tensors("mlp"),
)
