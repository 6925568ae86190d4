"""MiniMax-M2: experts behind routers by sigmoids, and a part of every head's columns turned.

Layers that predict further tokens (`num_mtp_modules`) are left out, as transformers does.
"""

from __future__ import annotations

from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.experts import LOCAL_EXPERTS, routed_tensors
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import LLAMA_LIKE
from bigplan.spec.hf.families.parts import Part, always, counts, written
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_MODULE = "block_sparse_moe"
# What the published files say beside transformers' keys, which their class always does.
_ALWAYS = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "router_jitter_noise": 0.0,
}


def _refuse_unlike(reader: ConfigReader) -> dict[str, Any]:
    for key, value in _ALWAYS.items():
        if reader.get(key) != value:
            reader.refuse(key, str(value))
    return {}


def _read_turned(reader: ConfigReader) -> dict[str, Any]:
    columns = reader.optional_count("rotary_dim")
    if columns is None:
        return {}
    usual = reader.count("hidden_size") // reader.count("num_attention_heads")
    return {"rotary_fraction": columns / (reader.optional_count("head_dim") or usual)}


def _write_turned(model: ModelSpec) -> dict[str, Any]:
    return {"rotary_dim": round(model.head_dim * model.rotary_fraction)}


_TURNED = {"rotary_fraction": ("rotary_dim", "partial_rotary_factor")}
MINIMAX_M2 = LLAMA_LIKE.like(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    _ALWAYS
    | {
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "router_aux_loss_coef": 0.0,
        "shared_moe_mode": "sigmoid",
        "rotary_dim": None,
    },
    Part(_refuse_unlike, lambda model: dict(_ALWAYS)),
    LOCAL_EXPERTS,
    counts(experts_per_token="num_experts_per_tok"),
    Part(_read_turned, _write_turned, _TURNED),
    # The loss that balances softmaxes has no meaning for sigmoids; transformers adds it anyway.
    always(qk_norm=True, qk_norm_whole=True, routing={"scores": "sigmoid", "bias": True}),
    written(NO_TOKENS),
    tensors=routed_tensors(_MODULE, ("w1", "w3", "w2"), dense=False).but(
        {ROUTER_BIAS: f"model.layers.{{}}.{_MODULE}.e_score_correction_bias"}
    ),
)
