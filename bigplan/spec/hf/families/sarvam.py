"""Sarvam 30B, a GLM-4.5, and Sarvam 105B, a DeepSeek-V3, whose files have names of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.deepseek import DEEPSEEK_V3
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.parts import off, on, only, words, written
from bigplan.spec.hf.families.shared_experts import GLM4_MOE
from bigplan.spec.hf.reader import ConfigReader

_BIAS, _SCORES = "moe_router_enable_expert_bias", "score_function"
_SHARED = "moe_shared_expert_intermediate_size"


def _as_wide(reader: ConfigReader) -> bool:
    width = reader.optional_count(_SHARED)
    return width in (None, reader.count("moe_intermediate_size"))


_OWN_KEYS = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "rms_norm_eps": 1e-6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    _BIAS: True,
    _SCORES: "sigmoid",
    _SHARED: None,
}
_PUBLISHED = (
    on(_BIAS, "true: experts are chosen with a bias"),
    words(_SCORES, "sigmoid"),
    only(_SHARED, "moe_intermediate_size, which a shared expert has", _as_wide),
    written(NO_TOKENS),
)
_WITHIN = "model.layers.{}"
_HEADS = ("q_proj", "k_proj", "v_proj")
SARVAM_MOE = (
    GLM4_MOE.like(
        "sarvam_moe",
        "Glm4MoeForCausalLM",
        {
            **_DEFAULTS,
            "intermediate_size": 8192,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 19,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "rope_theta": 8000000.0,
            "partial_rotary_factor": 1.0,
            "num_experts_per_tok": 6,
            "use_qk_norm": True,
            "use_bias": False,
        },
        off("use_bias"),
        *_PUBLISHED,
    )
    .published_as(
        GLM4_MOE.tensors.but(
            {
                "embed_tokens": "model.word_embeddings",
                **dict.fromkeys(_HEADS, f"{_WITHIN}.attention.query_key_value"),
                "o_proj": f"{_WITHIN}.attention.dense",
                "q_norm": f"{_WITHIN}.attention.query_layernorm",
                "k_norm": f"{_WITHIN}.attention.key_layernorm",
                ROUTER_BIAS: f"{_WITHIN}.mlp.gate.expert_bias",
            },
            fused=(_HEADS,),
        )
    )
    .by_old_names({**_OWN_KEYS, "attention_bias": "use_qkv_bias"})
)


_MLA = DEEPSEEK_V3.like(
    "sarvam_mla",
    "DeepseekV3ForCausalLM",
    {
        **_DEFAULTS,
        "intermediate_size": 16384,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 32,
        "n_routed_experts": 128,
        "q_lora_rank": None,
    },
    *_PUBLISHED,
).by_old_names(_OWN_KEYS)
_ROPE, _YARN = "rope_scaling", "deepseek_yarn"


def _read_mla(reader: ConfigReader) -> dict[str, Any]:
    """Of files that call DeepSeek's YaRN by a name of their own."""
    rope = reader.mapping(_ROPE)
    if _YARN in (rope.get("type"), rope.get("rope_type")):
        reader = reader.saying({_ROPE: {**rope, "rope_type": "yarn"}})
    return _MLA.read(reader)


SARVAM_MLA = replace(_MLA, read=_read_mla)
