"""Qwen3-Next: most blocks have a gated delta rule, others attention behind a gate."""

from __future__ import annotations

from typing import Any

from bigplan.spec.delta_rule_steps import (
    DECAY_OFFSET,
    DECAYS,
    FILTERS,
    GATES,
    KEYS,
    LOG_DECAY,
    NORM,
    QUERIES,
    RATES,
    VALUES,
)
from bigplan.spec.hf.families.dense_blocks import DENSE_BLOCKS
from bigplan.spec.hf.families.experts import EACH, EXPERTS, NORMALISED, ROUTER
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.layer_types import kinds_of_blocks
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE
from bigplan.spec.hf.families.mixers import mixer_fields
from bigplan.spec.hf.families.parts import Part, always, counts, written
from bigplan.spec.hf.families.rope import PARTLY_TURNED
from bigplan.spec.hf.families.shared_experts import QWEN2_MOE
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import ATTENTION, DELTA_RULE, OUTPUTS, GatedDeltaRule
from bigplan.spec.model import ModelSpec

_WORDS = {"full_attention": ATTENTION, "linear_attention": DELTA_RULE}
_TYPES = {mixer: word for word, mixer in _WORDS.items()}
_RULE = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}


def read_mixers(reader: ConfigReader) -> dict[str, Any]:
    """Which blocks have attention, by `layer_types` or else `full_attention_interval`."""
    blocks, every = reader.count("num_hidden_layers"), reader.count("full_attention_interval")
    mixers = kinds_of_blocks(reader, _WORDS, blocks) or [
        DELTA_RULE if (block + 1) % every else ATTENTION for block in range(blocks)
    ]
    return mixer_fields(
        mixers, DELTA_RULE, lambda: {field: reader.count(key) for field, key in _RULE.items()}
    )


def write_mixers(model: ModelSpec) -> dict[str, Any]:
    """The same."""
    rule = model.delta_rule or GatedDeltaRule(key_heads=16, value_heads=32)
    return {
        "layer_types": [_TYPES.get(mixer, "full_attention") for mixer in model.mixers],
        **{key: getattr(rule, field) for field, key in _RULE.items()},
    }


def _query_heads(model: ModelSpec) -> int:
    return model.heads


def _key_heads(model: ModelSpec) -> int:
    return 1 if model.delta_rule is None else model.delta_rule.key_heads


_WITHIN = "model.layers.{}.linear_attn"
GATED = ("q_proj", "q_gate_proj")  # fused by query head
GATED_BY_HEAD = dict.fromkeys(GATED, _query_heads)
CONVOLVED = tuple(name.removesuffix(".weight") for name in FILTERS)
# What files of all families with such blocks call alike.
MIXER_TENSORS = {
    "q_gate_proj": "model.layers.{}.self_attn.q_proj",
    **dict.fromkeys(CONVOLVED, f"{_WITHIN}.conv1d"),
    LOG_DECAY: f"{_WITHIN}.A_log",
    DECAY_OFFSET: f"{_WITHIN}.dt_bias",
    NORM.removesuffix(".weight"): f"{_WITHIN}.norm",
    OUTPUTS[DELTA_RULE]: f"{_WITHIN}.out_proj",
}
MIXER_DEFAULTS = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MIXERS = Part(
    read_mixers,
    write_mixers,
    {f"delta_rule.{field}": (key,) for field, key in _RULE.items()}
    | {"mixer_pattern": ("layer_types", "full_attention_interval")},
)
_HEADS, _EACH = (QUERIES, KEYS, VALUES, GATES), (RATES, DECAYS)
QWEN3_NEXT = LLAMA_LIKE.like(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    MIXER_DEFAULTS
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
    ROUTER,
    DENSE_BLOCKS,
    ATTENTION_BIAS,
    MIXERS,
    EACH,
    EXPERTS,
    NORMALISED,
    counts(shared_ffn="shared_expert_intermediate_size"),
    always(shared_gate=True, norm_plus_one=True, qk_norm=True, attention_gate=True),
    PARTLY_TURNED,
    written(NO_TOKENS),
    tensors=QWEN2_MOE.tensors.but(
        {
            **MIXER_TENSORS,
            **dict.fromkeys(_HEADS, f"{_WITHIN}.in_proj_qkvz"),
            **dict.fromkeys(_EACH, f"{_WITHIN}.in_proj_ba"),
        },
        fused=(GATED, _HEADS, _EACH, CONVOLVED),
        grouped=GATED_BY_HEAD | dict.fromkeys((*_HEADS, *_EACH), _key_heads),
    ),
)
