"""Qwen3.5's text models: Qwen3-Next's blocks with MLPs or experts, and files that name them so.

Its published models have a tower for pictures, too: beside_towers.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.delta_rule_steps import DECAYS, GATES, KEYS, QUERIES, RATES, VALUES
from bigplan.spec.hf.families.experts import DENSE, EACH, EXPERTS, ROUTER
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, LLAMA_TENSORS
from bigplan.spec.hf.families.parts import always, counts, empty, on, written
from bigplan.spec.hf.families.qwen3_next import (
    CONVOLVED,
    GATED,
    GATED_BY_HEAD,
    MIXER_DEFAULTS,
    MIXER_TENSORS,
    MIXERS,
)
from bigplan.spec.hf.families.rope import PARTLY_TURNED
from bigplan.spec.hf.families.shared_experts import QWEN2_MOE
from bigplan.spec.hf.reader import ConfigReader

_WITHIN = "model.layers.{}.linear_attn"
_JOINED = (QUERIES, KEYS, VALUES)
_OWN = {
    **MIXER_TENSORS,
    **dict.fromkeys(_JOINED, f"{_WITHIN}.in_proj_qkv"),
    GATES: f"{_WITHIN}.in_proj_z",
    RATES: f"{_WITHIN}.in_proj_b",
    DECAYS: f"{_WITHIN}.in_proj_a",
}
_JOINTLY: dict[str, Any] = {"fused": (GATED, _JOINED, CONVOLVED), "grouped": GATED_BY_HEAD}
QWEN3_5 = LLAMA_LIKE.like(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    MIXER_DEFAULTS
    | {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "attn_output_gate": True,
    },
    on("attn_output_gate", "true: attention stands behind a gate"),
    ATTENTION_BIAS,
    MIXERS,
    always(norm_plus_one=True, qk_norm=True, attention_gate=True),
    PARTLY_TURNED,
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but(_OWN, **_JOINTLY),
)


_MOE = QWEN3_5.like(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "router_aux_loss_coef": 0.001,
        "mlp_only_layers": None,
    },
    empty("mlp_only_layers", "an empty list: all blocks have experts"),
    ROUTER,
    EACH,
    EXPERTS,
    counts(shared_ffn="shared_expert_intermediate_size"),
    always(router_normalised=True, shared_gate=True),
    tensors=QWEN2_MOE.tensors.but(_OWN, without=DENSE, **_JOINTLY),
    without=("intermediate_size",),
)


def _read_moe(reader: ConfigReader) -> dict[str, Any]:
    """Files tell no width but that of an expert."""
    width = {"intermediate_size": reader.count("moe_intermediate_size")}
    return _MOE.read(replace(reader, defaults={**reader.defaults, **width}))


_KNOWN = {key: value for key, value in _MOE.defaults.items() if key != "intermediate_size"}
QWEN3_5_MOE = replace(_MOE, read=_read_moe, defaults=_KNOWN)
