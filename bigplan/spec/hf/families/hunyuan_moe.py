"""Hunyuan's mixtures of experts, one of which all tokens share."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.experts import DENSE, routed_tensors, shared_names
from bigplan.spec.hf.families.hunyuan import HUNYUAN
from bigplan.spec.hf.families.parts import Part
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

# Keys that transformers' class does not read, with what it does. Files may give one for each block.
_ALWAYS = {
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "group_limited_greedy": False,
    "moe_layer_num_skipped": 0,
    "moe_drop_tokens": False,
    "moe_random_routing_dropped_token": False,
    "use_mixed_mlp_moe": True,
    "use_cla": False,
    "num_shared_expert": 1,
}


def _each(reader: ConfigReader, key: str) -> Any:
    """The value of all blocks, of which a file may tell one by one."""
    value = reader.get(key)
    if not isinstance(value, list):
        return value
    if len({*map(repr, value)}) != 1:
        reader.refuse(key, "one value for all blocks")
    return value[0]


def _count(reader: ConfigReader, key: str) -> int:
    value = _each(reader, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        reader.refuse(key, "a whole number of 1 or more")
    return int(value)


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Each expert is as wide as the MLP that all tokens pass."""
    for key, value in _ALWAYS.items():
        if _each(reader, key) != value:
            reader.refuse(key, str(value).lower())
    width = reader.count("intermediate_size")
    if _each(reader, "moe_intermediate_size") not in (None, width):
        reader.refuse("moe_intermediate_size", "intermediate_size")
    return {
        "experts": _count(reader, "num_experts"),
        "experts_per_token": _count(reader, "moe_topk"),
        "router_normalised": True,
        "router_loss": 0.0,
        "shared_ffn": width,
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return {"num_experts": model.experts, "moe_topk": model.experts_per_token}


_ROUTED, _WITHIN = routed_tensors("mlp", dense=False).names, "model.layers.{}.mlp"
HUNYUAN_MOE = HUNYUAN.like(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    {
        **_ALWAYS,
        "num_experts": 1,
        "moe_topk": 1,
        "moe_intermediate_size": None,
    },
    Part(_read, _write, {"experts": ("num_experts",), "experts_per_token": ("moe_topk",)}),
    tensors=HUNYUAN.tensors.but(
        {
            **{name: place for name, place in _ROUTED.items() if name.startswith("experts.")},
            **shared_names(f"{_WITHIN}.shared_mlp"),
            "router": f"{_WITHIN}.gate.wg",
        },
        without=DENSE,
    ),
)
