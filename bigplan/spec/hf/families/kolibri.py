"""Kolibri 1: EXAONE 4's attention, norms before and after it and experts, one of them shared.

A router's correction bias is added to its scores before the sigmoid, where experts are chosen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.exaone import EXAONE4
from bigplan.spec.hf.families.experts import EACH, EXPERTS, NORMALISED
from bigplan.spec.hf.families.parts import always, counts
from bigplan.spec.hf.families.shared_experts import DEEPSEEK_TENSORS
from bigplan.spec.hf.reader import ConfigReader

_BLOCK = "model.layers.{}"
_KOLIBRI1 = EXAONE4.like(
    "kolibri1",
    "Kolibri1ForCausalLM",
    {
        "vocab_size": 128000,
        "hidden_size": 2560,
        "num_hidden_layers": 50,
        "num_attention_heads": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "sliding_window": 513,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 6,
        "num_experts": 384,
        "norm_topk_prob": False,
    },
    EACH,
    EXPERTS,
    NORMALISED,
    counts(experts_per_token="num_experts_per_tok", shared_ffn="shared_expert_intermediate_size"),
    always(norms="around", routing={"scores": "sigmoid", "bias": True, "bias_of": "scores"}),
    tensors=DEEPSEEK_TENSORS.but(
        {
            "attention_closing_norm": f"{_BLOCK}.post_attn_norm",
            "mlp_closing_norm": f"{_BLOCK}.post_ffn_norm",
            ROUTER_BIAS: f"{_BLOCK}.moe.router.expert_bias",
        }
    ),
    without=("intermediate_size", "sliding_window_pattern"),
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    types = [*reader.texts("layer_types")]
    if not types:
        blocks = range(1, reader.count("num_hidden_layers") + 1)
        types = ["sliding_attention" if block % 5 else "full_attention" for block in blocks]
    return _KOLIBRI1.read(reader.saying({"layer_types": types}))


KOLIBRI1 = replace(_KOLIBRI1, read=_read)
