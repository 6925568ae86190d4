"""DeepSeek-V2 and V3, and Kimi K2, which is a DeepSeek-V3: latent attention, experts or none.

Layers that predict further tokens (`num_nextn_predict_layers`) are left out, as transformers does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.dense_blocks import FIRST, Dense, by_frequency, dense_fields
from bigplan.spec.hf.families.llama import LLAMA_LIKE
from bigplan.spec.hf.families.parts import Part, joined, off, words, written
from bigplan.spec.hf.families.shared_experts import (
    DEEPSEEK_EXPERTS,
    DEEPSEEK_TENSORS,
    UNUSED_LOSS,
    read_deepseek_experts,
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
_TENSORS = DEEPSEEK_TENSORS.but(
    {
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


def _read_llama(reader: ConfigReader) -> dict[str, Any]:
    """Of a file whose `head_dim`, where it has one, is that of rope's columns."""
    fields = LLAMA_LIKE.read(reader)
    if fields["kv_heads"] != fields["heads"]:
        reader.refuse("num_key_value_heads", "num_attention_heads: each head has its keys")
    return {name: value for name, value in fields.items() if name != "head_dim"}


def _read_latent(reader: ConfigReader) -> dict[str, Any]:
    widths: dict[str, Any] = {
        field: reader.optional_count(key) if field == "query_rank" else reader.count(key)
        for field, key in _WIDTHS.items()
    }
    if reader.get("rms_norm_eps") != _EPSILON:
        widths["norm_epsilon"] = _EPSILON
    return {_LATENT: widths | {"interleaved": reader.flag("rope_interleave")}}


def _write_latent(model: ModelSpec) -> dict[str, Any]:
    latent = model.latent_attention
    if latent is None:  # which the file cannot say
        return {}
    widths = {key: getattr(latent, field) for field, key in _WIDTHS.items()}
    return widths | {"head_dim": latent.rope_dim, "rope_interleave": latent.interleaved}


def experts_but(dense: Callable[[ConfigReader], Dense]) -> Part:
    """Experts in all blocks but the `dense` ones; where all are, none has any."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        blocks = dense(reader)
        if all(blocks):
            return {}
        return read_deepseek_experts(reader) | dense_fields(reader, blocks)

    def write(model: ModelSpec) -> dict[str, Any]:
        return DEEPSEEK_EXPERTS.write(model) if model.experts else {FIRST: model.layers}

    keys = {**DEEPSEEK_EXPERTS.keys, "expert_pattern": ("moe_layer_freq",)}
    return joined(Part(read, write, keys), UNUSED_LOSS, written({"num_nextn_predict_layers": 0}))


# All but their experts.
LATENT = replace(LLAMA_LIKE, read=_read_llama).like(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
    },
    off("attention_bias"),
    Part(_read_latent, _write_latent, {_LATENT: tuple(_WIDTHS.values())}),
    written({"attention_bias": False}),
    tensors=_TENSORS,
)
EXPERTS = experts_but(by_frequency)
DEEPSEEK_V3 = LATENT.like(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    {
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
    words("scoring_func", "sigmoid"),
    EXPERTS,
    written({"scoring_func": "sigmoid"}),
)
_GREEDY, _LIMITED = "greedy", "group_limited_greedy"


def _read_softmax(reader: ConfigReader) -> dict[str, Any]:
    """Shares are by softmax, and a group's best expert alone counts for it."""
    fields = EXPERTS.read(reader)
    routing = fields.pop("routing", {})
    limited = reader.text("topk_method") == _LIMITED and routing.get("groups", 1) > 1
    named = {"groups", "groups_per_token"} if limited else set()
    if routing.get("scale", 1.0) != 1.0:
        named.add("scale")
    told = {key: routing[key] for key in named} | ({"group_best": 1} if limited else {})
    return fields | ({"routing": told} if told else {})


def _write_softmax(model: ModelSpec) -> dict[str, Any]:
    method = _GREEDY if model.routed_by.groups == 1 else _LIMITED
    return EXPERTS.write(model) | {"scoring_func": "softmax", "topk_method": method}


DEEPSEEK_V2 = LATENT.like(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {
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
    words("scoring_func", "softmax"),
    words("topk_method", _GREEDY, _LIMITED),
    Part(_read_softmax, _write_softmax, EXPERTS.keys),
)
