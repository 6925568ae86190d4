"""AFMoE (Arcee Trinity): norms before and after attention and experts, and gated attention.

Rope turns nothing in global blocks. The norm after experts is of their sum with the shared ones.
"""

from __future__ import annotations

from dataclasses import replace
from math import isclose, sqrt
from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.layer_types import layer_types, turned_by_windows
from bigplan.spec.hf.families.llama import LLAMA_LIKE
from bigplan.spec.hf.families.parts import Part, always, off, renamed, written
from bigplan.spec.hf.families.shared_experts import DEEPSEEK_EXPERTS, DEEPSEEK_TENSORS
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

# DeepSeek-V3's keys, and what they are called here.
_NAMED = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
    "routed_scaling_factor": "route_scale",
}
_EXPERTS = renamed(DEEPSEEK_EXPERTS, _NAMED)
# What transformers' code does not read: it chooses among all experts, and weights sum to 1.
_FIXED = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
_EVERY = "global_attn_every_n_layers"


def _read_experts(reader: ConfigReader) -> dict[str, Any]:
    for key in ("n_group", "topk_group"):
        if reader.get(key) not in (None, 1):
            reader.refuse(key, "1: a token chooses among all experts")
    return _EXPERTS.read(reader.saying(_FIXED))


def _read_scale(reader: ConfigReader) -> dict[str, Any]:
    scaled = reader.flag("mup_enabled")
    return {"embedding_scale": sqrt(reader.count("hidden_size")) if scaled else 1.0}


def _write_scale(model: ModelSpec) -> dict[str, Any]:
    return {"mup_enabled": isclose(model.embedding_scale, sqrt(model.hidden))}


_MLP = "model.layers.{}.mlp"
AFMOE = LLAMA_LIKE.like(
    "afmoe",
    "AfmoeForCausalLM",
    {
        "vocab_size": 200192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 32,
        "num_dense_layers": 1,
        "num_attention_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "route_scale": 1.0,
        "global_attn_every_n_layers": 4,
        "sliding_window": 1024,
        "mup_enabled": False,
        "n_group": 1,
        "topk_group": 1,
    },
    off("attention_bias"),
    turned_by_windows(
        layer_types(lambda reader, block: (block + 1) % reader.count(_EVERY) > 0, _EVERY)
    ),
    replace(_EXPERTS, read=_read_experts),
    Part(_read_scale, _write_scale, {"embedding_scale": ("mup_enabled",)}),
    always(norms="around", qk_norm=True, attention_gate=True),
    written({"attention_bias": False}),
    tensors=DEEPSEEK_TENSORS.but(
        {
            "q_gate_proj": "model.layers.{}.self_attn.gate_proj",
            "attention_closing_norm": "model.layers.{}.post_attention_layernorm",
            "post_norm": "model.layers.{}.pre_mlp_layernorm",
            "mlp_closing_norm": "model.layers.{}.post_mlp_layernorm",
            "router": f"{_MLP}.router.gate",
            ROUTER_BIAS: f"{_MLP}.expert_bias",
        }
    ),
    without=tuple(_FIXED),
)
