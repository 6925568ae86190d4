"""ERNIE 4.5's mixtures of experts: shares by softmax, and a bias where experts are chosen.

Layers that predict further tokens (`num_nextn_predict_layers`) are left out, as transformers does.
"""

from __future__ import annotations

from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.dense_blocks import Dense, dense_fields
from bigplan.spec.hf.families.ernie import ERNIE
from bigplan.spec.hf.families.experts import EACH, routed_tensors, shared_names
from bigplan.spec.hf.families.parts import Part, values, words
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_FIRST, _LAST = "moe_layer_start_index", "moe_layer_end_index"
_EVERY = "moe_layer_interval"


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Files of transformers 5 have other names for two keys, as its attributes do."""
    shared = reader.optional_count("moe_num_shared_experts", least=0) or 0
    return {
        "experts": reader.optional_count("num_experts") or reader.count("moe_num_experts"),
        "experts_per_token": reader.optional_count("num_experts_per_tok") or reader.count("moe_k"),
        "router_normalised": True,
        "routing": {"bias": True},
        "shared_ffn": shared * reader.count("moe_intermediate_size"),
        **dense_fields(reader, _dense(reader, reader.count("num_hidden_layers"))),
    }


def _dense(reader: ConfigReader, blocks: int) -> Dense:
    """Experts are in each so-many-th block, from a first one to a last one."""
    every, first = reader.count(_EVERY), reader.count(_FIRST, least=0)
    last = reader.count(_LAST, least=-1)
    last = blocks - 1 if last == -1 else last
    return [not (first <= n <= last and (n + 1) % every == 0) for n in range(blocks)]


def _write_dense(model: ModelSpec) -> dict[str, Any]:
    """The same, where blocks with experts are that far apart."""
    routed = [number for number, dense in enumerate(model.dense) if not dense]
    every = routed[1] - routed[0] if len(routed) > 1 else 1
    last = -1 if routed[-1] + every >= model.layers else routed[-1]
    return {_FIRST: routed[0], _LAST: last, _EVERY: every}


def _write(model: ModelSpec) -> dict[str, Any]:
    return {
        "intermediate_size": model.dense_ffn or model.ffn,
        "moe_num_experts": model.experts,
        "moe_k": model.experts_per_token,
        "moe_num_shared_experts": model.shared_ffn // max(1, model.ffn),
        **_write_dense(model),
        "output_router_logits": model.router_loss > 0,
    }


_KEYS = {
    "experts": ("moe_num_experts", "num_experts"),
    "experts_per_token": ("moe_k", "num_experts_per_tok"),
    "shared_ffn": ("moe_num_shared_experts",),
    "dense_blocks": (_FIRST,),
    "expert_pattern": (_EVERY, _FIRST),
    "dense_ffn": ("intermediate_size",),
}
_WITHIN = "model.layers.{}.mlp"
ERNIE_MOE = ERNIE.like(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    {
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": None,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        _FIRST: 1,
        _LAST: -1,
        _EVERY: 1,
        "moe_gate": "topk",
        # Of no meaning for a step in which no token is dropped.
        **dict.fromkeys(("moe_capacity", "moe_use_aux_free", "moe_norm_min")),
        "router_aux_loss_coef": 0.001,
    },
    words("moe_gate", "topk"),
    EACH,
    values(router_loss="router_aux_loss_coef"),
    Part(_read, _write, _KEYS),
    tensors=ERNIE.tensors.but(
        {
            **routed_tensors("mlp").names,
            **shared_names(f"{_WITHIN}.shared_experts"),
            ROUTER_BIAS: f"{_WITHIN}.moe_statics.e_score_correction_bias",
        },
        as_row=(ROUTER_BIAS,),
    ),
)
