"""K-EXAONE: EXAONE 4's attention, norms before it and before DeepSeek-V3's experts.

Layers that predict further tokens (`num_nextn_predict_layers`) are left out, as transformers does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.dense_blocks import FIRST, by_types, first_ones, write_types
from bigplan.spec.hf.families.exaone import EXAONE4
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.shared_experts import (
    DEEPSEEK_KEYS,
    DEEPSEEK_TENSORS,
    read_deepseek_experts,
    write_deepseek_experts,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import ROUTER_BIAS
from bigplan.spec.model import ModelSpec

_NAMED = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Two of DeepSeek-V3's keys have other names; a list of blocks comes before a number."""
    fields = EXAONE4.read(reader) | {"norms": "before"}
    if reader.config.get("num_local_experts"):  # as transformers 5 may call them
        reader.refuse("num_local_experts", "num_experts")
    first = first_ones(reader.count(FIRST, least=0), fields["layers"])
    told = {theirs: reader.get(ours) for theirs, ours in _NAMED.items()}
    own = replace(reader, config={**reader.config, **told})
    return fields | read_deepseek_experts(own, by_types(reader, first))


def _write(model: ModelSpec) -> dict[str, Any]:
    experts = write_deepseek_experts(model)
    return {
        **EXAONE4.write(model),
        **{_NAMED.get(key, key): value for key, value in experts.items()},
        "mlp_layer_types": write_types(model),
        "model_type": "exaone_moe",
        "architectures": ["ExaoneMoeForCausalLM"],
    }


_BIAS = "model.layers.{}.mlp.e_score_correction_bias"
EXAONE_MOE = ModelFamily(
    _read,
    {
        **EXAONE4.defaults,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    _write,
    replace(DEEPSEEK_TENSORS, names={**DEEPSEEK_TENSORS.names, ROUTER_BIAS: _BIAS}),
    {
        **EXAONE4.keys,
        **DEEPSEEK_KEYS,
        "experts": ("num_experts",),
        "shared_ffn": ("num_shared_experts",),
        "dense_blocks": ("mlp_layer_types", "first_k_dense_replace"),
        "expert_pattern": ("mlp_layer_types",),
    },
)
