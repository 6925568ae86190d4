"""Qwen2-MoE, GLM-4.5 and dots.llm1: some experts are shared by all tokens.

What DeepSeek-V3's config.json says of experts, GLM-4.5's and dots.llm1's say by the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.dense_blocks import (
    DENSE_KEYS,
    FIRST,
    Dense,
    dense_fields,
    first_ones,
    read_dense,
    write_dense,
)
from bigplan.spec.hf.families.experts import (
    DENSE,
    ROUTER_KEYS,
    read_router,
    routed_tensors,
    write_router,
)
from bigplan.spec.hf.families.family import ModelFamily, Tensors
from bigplan.spec.hf.families.llama import (
    ATTENTION_BIAS,
    LLAMA_DEFAULTS,
    LLAMA_LIKE,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.families.parts import Part, always, flags, written
from bigplan.spec.hf.families.rope import PARTLY_TURNED
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _tensors(shared: str, others: Mapping[str, str]) -> Tensors:
    """Those of routed experts and dense blocks, with the shared experts' module, and others."""
    routed, within = routed_tensors("mlp"), "model.layers.{}.mlp"
    beside = {f"shared.{name}": f"{within}.{shared}.{name}" for name in DENSE}
    more = {name: f"{within}.{place}" for name, place in others.items()}
    return replace(routed, names={**routed.names, **beside, **more})


def _read_qwen2(reader: ConfigReader) -> dict[str, Any]:
    if reader.flag("use_sliding_window"):
        reader.refuse("use_sliding_window", "false")
    return (
        read_llama_like(reader)
        | read_router(reader)
        | read_dense(reader)
        | {
            "ffn": reader.count("moe_intermediate_size"),
            "experts": reader.optional_count("num_local_experts") or reader.count("num_experts"),
            "router_normalised": reader.flag("norm_topk_prob"),
            "shared_ffn": reader.count("shared_expert_intermediate_size"),
            "shared_gate": True,
            "qkv_bias": reader.flag("qkv_bias"),
        }
    )


def _write_qwen2(model: ModelSpec) -> dict[str, Any]:
    return (
        write_llama_like(model, "qwen2_moe", "Qwen2MoeForCausalLM")
        | write_router(model)
        | write_dense(model)
        | {
            "moe_intermediate_size": model.ffn,
            "num_experts": model.experts,
            "norm_topk_prob": model.router_normalised,
            "shared_expert_intermediate_size": model.shared_ffn,
            "qkv_bias": model.qkv_bias,
            "use_sliding_window": False,
        }
    )


QWEN2_MOE = ModelFamily(
    _read_qwen2,
    LLAMA_DEFAULTS
    | {
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "qkv_bias": True,
    },
    _write_qwen2,
    _tensors("shared_expert", {"shared_gate": "shared_expert_gate"}),
    ROUTER_KEYS
    | DENSE_KEYS
    | {
        "experts": ("num_experts", "num_local_experts"),
        "ffn": ("moe_intermediate_size",),
        "router_normalised": ("norm_topk_prob",),
        "shared_ffn": ("shared_expert_intermediate_size",),
    },
)

# DeepSeek-V3's keys; layers that predict further tokens are left out, as transformers does.
DEEPSEEK_KEYS = {
    "experts": ("n_routed_experts",),
    "experts_per_token": ("num_experts_per_tok",),
    "ffn": ("moe_intermediate_size",),
    "router_normalised": ("norm_topk_prob",),
    "shared_ffn": ("n_shared_experts",),
    "dense_blocks": ("first_k_dense_replace",),
    "dense_ffn": ("intermediate_size",),
    "routing.groups": ("n_group",),
    "routing.groups_per_token": ("topk_group",),
    "routing.scale": ("routed_scaling_factor",),
}
DEEPSEEK_TENSORS = _tensors("shared_experts", {ROUTER_BIAS: "gate.e_score_correction_bias"})


def read_deepseek_experts(reader: ConfigReader, dense: Dense | None = None) -> dict[str, Any]:
    """Experts, shared ones, first blocks and routing by DeepSeek-V3's keys.

    `dense`: blocks without experts; None: so many first ones as a key says.
    """
    each = reader.count("moe_intermediate_size")
    shared = reader.optional_count("n_shared_experts", least=0) or 0
    if dense is None:
        first = reader.optional_count(FIRST, least=0) or 0
        dense = first_ones(first, first)  # of all blocks, others have experts
    return {
        "ffn": each,
        "experts": reader.count("n_routed_experts"),
        "experts_per_token": reader.count("num_experts_per_tok"),
        "router_normalised": reader.flag("norm_topk_prob"),
        "shared_ffn": shared * each,
        **dense_fields(reader, dense),
        "routing": {
            "scores": "sigmoid",
            "bias": True,
            "groups": reader.optional_count("n_group") or 1,
            "groups_per_token": reader.optional_count("topk_group") or 1,
            "scale": reader.get("routed_scaling_factor"),
        },
    }


def write_deepseek_experts(model: ModelSpec) -> dict[str, Any]:
    """The same; a model whose shared experts are not as wide as others reads back differently."""
    return {
        "intermediate_size": model.dense_ffn or model.ffn,
        "moe_intermediate_size": model.ffn,
        "n_routed_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.router_normalised,
        "n_shared_experts": model.shared_ffn // max(1, model.ffn),
        "first_k_dense_replace": model.dense_blocks,
        "n_group": model.routed_by.groups,
        "topk_group": model.routed_by.groups_per_token,
        "routed_scaling_factor": model.routed_by.scale,
    }


DEEPSEEK_EXPERTS = Part(read_deepseek_experts, write_deepseek_experts, DEEPSEEK_KEYS)
# Files may have the coefficient, of which nothing is made.
UNUSED_LOSS = Part(keys={"router_loss": ("router_aux_loss_coef",)})
GLM4_MOE = LLAMA_LIKE.like(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
    },
    DEEPSEEK_EXPERTS,
    UNUSED_LOSS,
    flags(qkv_bias="attention_bias", qk_norm="use_qk_norm"),
    PARTLY_TURNED,
    written({"num_nextn_predict_layers": 0}),
    tensors=DEEPSEEK_TENSORS,
)


def _no_window(reader: ConfigReader) -> dict[str, Any]:
    window, far = (
        reader.optional_count("sliding_window"),
        reader.optional_count("max_window_layers"),
    )
    types = reader.texts("layer_types")
    slides = far is not None and far < reader.count("num_hidden_layers")
    if window is not None and (set(types) != {"full_attention"} if types else slides):
        reader.refuse("sliding_window", "null: all blocks see all tokens")
    return {}


DOTS1 = LLAMA_LIKE.like(
    "dots1",
    "Dots1ForCausalLM",
    {
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_shared_experts": None,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    Part(_no_window),
    DEEPSEEK_EXPERTS,
    UNUSED_LOSS,
    ATTENTION_BIAS,
    always(qk_norm=True),
    written({"sliding_window": None}),
    tensors=DEEPSEEK_TENSORS,
)
