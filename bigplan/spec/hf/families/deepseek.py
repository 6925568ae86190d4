"""DeepSeek-V2 and V3, and Kimi K2, which is a DeepSeek-V3: latent attention, experts or none.

Layers that predict further tokens (`num_nextn_predict_layers`) are left out, as transformers does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.dense_blocks import Dense, by_frequency
from bigplan.spec.hf.families.experts import ROUTER_KEYS
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.llama import LLAMA_DEFAULTS, read_llama_like, write_llama_like
from bigplan.spec.hf.families.shared_experts import (
    DEEPSEEK_KEYS,
    DEEPSEEK_TENSORS,
    read_deepseek_experts,
    write_deepseek_experts,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_LATENT = "latent_attention"
_WIDTHS = {
    "query_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "plain_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
# Of the norms of latents in transformers' class and DeepSeek's own, whatever `rms_norm_eps` says.
_EPSILON = 1e-6
_BY_HEAD = ("k_b_proj", "v_b_proj")
_SIDE_BY_SIDE = ("kv_a_proj", "k_rope_proj")
_WITHIN = "model.layers.{}.self_attn"
_TENSORS = replace(
    DEEPSEEK_TENSORS,
    names={
        **DEEPSEEK_TENSORS.names,
        "q_a_proj": f"{_WITHIN}.q_a_proj",
        "q_a_norm": f"{_WITHIN}.q_a_layernorm",
        "q_b_proj": f"{_WITHIN}.q_b_proj",
        "kv_a_norm": f"{_WITHIN}.kv_a_layernorm",
        **dict.fromkeys(_SIDE_BY_SIDE, f"{_WITHIN}.kv_a_proj_with_mqa"),
        **dict.fromkeys(_BY_HEAD, f"{_WITHIN}.kv_b_proj"),
    },
    fused=(_SIDE_BY_SIDE, _BY_HEAD),
    by_head=_BY_HEAD,
)
_KEYS = (
    ROUTER_KEYS
    | DEEPSEEK_KEYS
    | {_LATENT: tuple(_WIDTHS.values()), "expert_pattern": ("moe_layer_freq",)}
)
_GREEDY, _LIMITED = "greedy", "group_limited_greedy"
_DEFAULTS = LLAMA_DEFAULTS | {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "router_aux_loss_coef": 0.0,
    "moe_layer_freq": 1,
}


def read_deepseek(reader: ConfigReader, dense: Dense | None = None) -> dict[str, Any]:
    """Of a config whose `head_dim`, where it has one, is that of rope's columns.

    `dense`: blocks without experts, if not as DeepSeek's keys have it; where all are, none has any.
    """
    dense = by_frequency(reader) if dense is None else dense
    fields = read_llama_like(reader)
    fields.pop("head_dim", None)
    if reader.flag("attention_bias"):
        reader.refuse("attention_bias", "false")
    if fields["kv_heads"] != fields["heads"]:
        reader.refuse("num_key_value_heads", "num_attention_heads: each head has its keys")
    widths: dict[str, Any] = {
        field: reader.optional_count(key) if field == "query_rank" else reader.count(key)
        for field, key in _WIDTHS.items()
    }
    if reader.get("rms_norm_eps") != _EPSILON:
        widths["norm_epsilon"] = _EPSILON
    latent = {_LATENT: widths | {"interleaved": reader.flag("rope_interleave")}}
    return fields | latent | ({} if all(dense) else read_deepseek_experts(reader, dense))


def _read_v3(reader: ConfigReader) -> dict[str, Any]:
    _only(reader, "scoring_func", "sigmoid")
    return read_deepseek(reader)


def _read_v2(reader: ConfigReader) -> dict[str, Any]:
    """Shares are by softmax, and a group's best expert alone counts for it."""
    _only(reader, "scoring_func", "softmax")
    _only(reader, "topk_method", _GREEDY, _LIMITED)
    fields = read_deepseek(reader)
    routing = fields.pop("routing", {})
    limited = reader.text("topk_method") == _LIMITED and routing.get("groups", 1) > 1
    named = {"groups", "groups_per_token"} if limited else set()
    if routing.get("scale", 1.0) != 1.0:
        named.add("scale")
    told = {key: routing[key] for key in named} | ({"group_best": 1} if limited else {})
    return fields | ({"routing": told} if told else {})


def _only(reader: ConfigReader, key: str, *values: str) -> None:
    if reader.text(key) not in values:
        reader.refuse(key, " or ".join(values))


def write_deepseek(model: ModelSpec, model_type: str, architecture: str) -> dict[str, Any]:
    """The same."""
    config = write_llama_like(model, model_type, architecture)
    config |= (
        write_deepseek_experts(model) if model.experts else {"first_k_dense_replace": model.layers}
    )
    latent = model.latent_attention
    if latent is None:  # which the file cannot say
        return config
    widths = {key: getattr(latent, field) for field, key in _WIDTHS.items()}
    return (
        config
        | widths
        | {
            "head_dim": latent.rope_dim,
            "attention_bias": False,
            "rope_interleave": latent.interleaved,
            "num_nextn_predict_layers": 0,
        }
    )


def _write_v3(model: ModelSpec) -> dict[str, Any]:
    return write_deepseek(model, "deepseek_v3", "DeepseekV3ForCausalLM") | {
        "scoring_func": "sigmoid"
    }


def _write_v2(model: ModelSpec) -> dict[str, Any]:
    config = write_deepseek(model, "deepseek_v2", "DeepseekV2ForCausalLM")
    method = _GREEDY if model.routed_by.groups == 1 else _LIMITED
    return config | {"scoring_func": "softmax", "topk_method": method}


DEEPSEEK_V3 = ModelFamily(
    _read_v3,
    _DEFAULTS
    | {
        "max_position_embeddings": 4096,
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 3,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    _write_v3,
    _TENSORS,
    _KEYS,
)
DEEPSEEK_V2 = ModelFamily(
    _read_v2,
    _DEFAULTS
    | {
        "max_position_embeddings": 2048,
        "scoring_func": "softmax",
        "topk_method": _GREEDY,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
    },
    _write_v2,
    _TENSORS,
    _KEYS,
)
