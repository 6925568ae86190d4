"""K-EXAONE: EXAONE 4's attention, norms before it and before DeepSeek-V3's experts.

Layers that predict further tokens (`num_nextn_predict_layers`) are left out, as transformers does.
"""

from __future__ import annotations

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.dense_blocks import mlp_types
from bigplan.spec.hf.families.exaone import EXAONE4
from bigplan.spec.hf.families.parts import always, only, renamed
from bigplan.spec.hf.families.shared_experts import DEEPSEEK_EXPERTS, DEEPSEEK_TENSORS

_FIRST, _LOCAL = "first_k_dense_replace", "num_local_experts"
_EXPERTS = renamed(
    DEEPSEEK_EXPERTS,
    {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
)


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
    # As transformers 5 may call them.
    only(_LOCAL, "num_experts", lambda reader: not reader.config.get(_LOCAL)),
    _EXPERTS,
    mlp_types(lambda reader: reader.count(_FIRST, least=0), _FIRST),
    tensors=DEEPSEEK_TENSORS.but({ROUTER_BIAS: "model.layers.{}.mlp.e_score_correction_bias"}),
)
