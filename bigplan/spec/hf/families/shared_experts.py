"""Qwen2-MoE, GLM-4.5 and dots.llm1: some experts are shared by all tokens.

What DeepSeek-V3's config.json says of experts, GLM-4.5's and dots.llm1's say by the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.dense_blocks import DENSE_BLOCKS, FIRST, first_fields
from bigplan.spec.hf.families.experts import (
    EACH,
    EXPERTS,
    NORMALISED,
    ROUTER,
    routed_tensors,
    shared_names,
)
from bigplan.spec.hf.families.family import Tensors
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE
from bigplan.spec.hf.families.parts import Part, always, counts, flags, off, written
from bigplan.spec.hf.families.rope import PARTLY_TURNED
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _tensors(shared: str, others: Mapping[str, str]) -> Tensors:
    """Those of routed experts and dense blocks, with the shared experts' module, and others."""
    within = "model.layers.{}.mlp"
    beside = shared_names(f"{within}.{shared}")
    more = {name: f"{within}.{place}" for name, place in others.items()}
    return routed_tensors("mlp").but({**beside, **more})


QWEN2_MOE = LLAMA_LIKE.like(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    {
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
    off("use_sliding_window"),
    ROUTER,
    DENSE_BLOCKS,
    EACH,
    EXPERTS,
    NORMALISED,
    counts(shared_ffn="shared_expert_intermediate_size"),
    flags(qkv_bias="qkv_bias"),
    always(shared_gate=True),
    written({"use_sliding_window": False}),
    tensors=_tensors("shared_expert", {"shared_gate": "shared_expert_gate"}),
)

DEEPSEEK_TENSORS = _tensors("shared_experts", {ROUTER_BIAS: "gate.e_score_correction_bias"})


def read_deepseek_experts(reader: ConfigReader) -> dict[str, Any]:
    """Experts, shared ones and routing by DeepSeek-V3's keys, but not which blocks have them."""
    each = reader.count("moe_intermediate_size")
    shared = reader.optional_count("n_shared_experts", least=0) or 0
    return {
        "ffn": each,
        "experts": reader.count("n_routed_experts"),
        "experts_per_token": reader.count("num_experts_per_tok"),
        "router_normalised": reader.flag("norm_topk_prob"),
        "shared_ffn": shared * each,
        "routing": {
            "scores": "sigmoid",
            "bias": True,
            "groups": reader.optional_count("n_group") or 1,
            "groups_per_token": reader.optional_count("topk_group") or 1,
            "scale": reader.get("routed_scaling_factor"),
        },
    }


def _read_behind_first(reader: ConfigReader) -> dict[str, Any]:
    first = reader.optional_count(FIRST, least=0) or 0
    return read_deepseek_experts(reader) | first_fields(reader, first)


def _write_deepseek_experts(model: ModelSpec) -> dict[str, Any]:
    """A model whose shared experts are not as wide as others reads back differently."""
    return {
        "intermediate_size": model.dense_ffn or model.ffn,
        "moe_intermediate_size": model.ffn,
        "n_routed_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "norm_topk_prob": model.router_normalised,
        "n_shared_experts": model.shared_ffn // max(1, model.ffn),
        FIRST: model.dense_blocks,
        "n_group": model.routed_by.groups,
        "topk_group": model.routed_by.groups_per_token,
        "routed_scaling_factor": model.routed_by.scale,
    }


# DeepSeek-V3's keys; layers that predict further tokens are left out, as transformers does.
DEEPSEEK_EXPERTS = Part(
    _read_behind_first,
    _write_deepseek_experts,
    {
        "experts": ("n_routed_experts",),
        "experts_per_token": ("num_experts_per_tok",),
        "ffn": ("moe_intermediate_size",),
        "router_normalised": ("norm_topk_prob",),
        "shared_ffn": ("n_shared_experts",),
        "dense_blocks": (FIRST,),
        "dense_ffn": ("intermediate_size",),
        "routing.groups": ("n_group",),
        "routing.groups_per_token": ("topk_group",),
        "routing.scale": ("routed_scaling_factor",),
    },
)
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
        FIRST: 1,
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
        FIRST: 0,
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
