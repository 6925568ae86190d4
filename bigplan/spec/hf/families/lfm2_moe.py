"""LFM2 with experts behind routers by sigmoids in all but the first blocks (LFM2-8B-A1B)."""

from __future__ import annotations

from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.dense_blocks import dense_fields, first_ones
from bigplan.spec.hf.families.experts import DENSE, EACH, NORMALISED
from bigplan.spec.hf.families.lfm2 import LFM2, LFM2_LIKE
from bigplan.spec.hf.families.parts import Part, counts
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    dense = reader.optional_count("num_dense_layers", least=0) or 0
    return {
        **dense_fields(reader, first_ones(dense, reader.count("num_hidden_layers"))),
        "routing": {
            "scores": "sigmoid",
            "bias": reader.flag("use_expert_bias"),
            "scale": reader.get("routed_scaling_factor"),
        },
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return {
        "intermediate_size": model.dense_ffn or model.ffn,
        "num_dense_layers": model.dense_blocks,
        "use_expert_bias": model.routed_by.bias,
        "routed_scaling_factor": model.routed_by.scale,
    }


_KEYS = {
    "dense_blocks": ("num_dense_layers",),
    "dense_ffn": ("intermediate_size",),
    "routing.bias": ("use_expert_bias",),
    "routing.scale": ("routed_scaling_factor",),
}
_WITHIN = "model.layers.{}.feed_forward"
LFM2_MOE = LFM2_LIKE.like(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "num_experts": 32,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    EACH,
    NORMALISED,
    counts(experts="num_experts", experts_per_token="num_experts_per_tok"),
    Part(_read, _write, _KEYS),
    tensors=LFM2.tensors.but(
        {
            "router": f"{_WITHIN}.gate",
            ROUTER_BIAS: f"{_WITHIN}.expert_bias",
            **{
                f"experts.{ours}": f"{_WITHIN}.experts.{{expert}}.{theirs}"
                for ours, theirs in zip(DENSE, ("w1", "w3", "w2"), strict=True)
            },
        }
    ),
)
