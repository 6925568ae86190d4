"""Granite 3's mixtures of experts, without and with an MLP beside them that all tokens pass."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.experts import LOCAL_EXPERTS, ROUTER
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.granite import FACTORS, GRANITE
from bigplan.spec.hf.families.granite_hybrid import GRANITE_HYBRID
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE
from bigplan.spec.hf.families.parts import Part, written
from bigplan.spec.hf.reader import ConfigReader


def _read_shared(reader: ConfigReader) -> dict[str, Any]:
    return {"shared_ffn": reader.count("shared_intermediate_size", least=0)}


# Granite 4's files keep experts, and the MLP beside them, in the same way.
GRANITE_MOE = LLAMA_LIKE.like(
    "granitemoe",
    "GraniteMoeForCausalLM",
    {
        **GRANITE.defaults,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    ATTENTION_BIAS,
    FACTORS,
    ROUTER,
    LOCAL_EXPERTS,
    written(NO_TOKENS),
    tensors=GRANITE_HYBRID.tensors,
)
GRANITE_MOE_SHARED = GRANITE_MOE.like(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    {"shared_intermediate_size": 0},
    Part(
        _read_shared,
        lambda model: {"shared_intermediate_size": model.shared_ffn},
        {"shared_ffn": ("shared_intermediate_size",)},
    ),
)
