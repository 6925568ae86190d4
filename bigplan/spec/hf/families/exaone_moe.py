"""K-EXAONE: EXAONE 4's attention, norms before it and before DeepSeek-V3's experts.

Layers that predict further tokens (`num_nextn_predict_layers`) are left out, as transformers does.
"""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.exaone import EXAONE4
from bigplan.spec.hf.families.layer_types import dense_first, write_dense_first
from bigplan.spec.hf.families.parts import Part, always, renamed
from bigplan.spec.hf.families.shared_experts import DEEPSEEK_EXPERTS, DEEPSEEK_TENSORS
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import ROUTER_BIAS
from bigplan.spec.model import ModelSpec

_FIRST = "first_k_dense_replace"
_EXPERTS = renamed(
    DEEPSEEK_EXPERTS,
    {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    """A list of blocks comes before a number."""
    if reader.config.get("num_local_experts"):  # as transformers 5 may call them
        reader.refuse("num_local_experts", "num_experts")
    first = reader.count(_FIRST, least=0)
    dense = dense_first(reader, reader.count("num_hidden_layers"), otherwise=first)
    return _EXPERTS.read(reader.saying({_FIRST: dense}))


def _write(model: ModelSpec) -> dict[str, Any]:
    return _EXPERTS.write(model) | {"mlp_layer_types": write_dense_first(model)}


EXAONE_MOE = EXAONE4.like(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    {
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
    always(norms="before"),
    Part(_read, _write, {**_EXPERTS.keys, "dense_blocks": ("mlp_layer_types", _FIRST)}),
    tensors=DEEPSEEK_TENSORS.but({ROUTER_BIAS: "model.layers.{}.mlp.e_score_correction_bias"}),
)
