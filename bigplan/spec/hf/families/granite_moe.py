"""Granite 3's mixtures of experts, without and with an MLP beside them that all tokens pass."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.experts import ROUTER_KEYS, read_router, write_router
from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.granite import GRANITE, read_factors, write_factors
from bigplan.spec.hf.families.granite_hybrid import GRANITE_HYBRID
from bigplan.spec.hf.families.llama import read_attention_bias, read_llama_like, write_llama_like
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    return (
        read_llama_like(reader)
        | read_attention_bias(reader)
        | read_factors(reader)
        | read_router(reader)
        | {"experts": reader.count("num_local_experts")}
    )


def _read_shared(reader: ConfigReader) -> dict[str, Any]:
    return _read(reader) | {"shared_ffn": reader.count("shared_intermediate_size", least=0)}


def _written(model: ModelSpec, model_type: str, architecture: str) -> dict[str, Any]:
    return (
        write_llama_like(model, model_type, architecture)
        | write_factors(model)
        | write_router(model)
        | {"attention_bias": model.qkv_bias, "num_local_experts": model.experts, **NO_TOKENS}
    )


def _write(model: ModelSpec) -> dict[str, Any]:
    return _written(model, "granitemoe", "GraniteMoeForCausalLM")


def _write_shared(model: ModelSpec) -> dict[str, Any]:
    config = _written(model, "granitemoeshared", "GraniteMoeSharedForCausalLM")
    return config | {"shared_intermediate_size": model.shared_ffn}


_DEFAULTS = {
    **GRANITE.defaults,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}
_KEYS = {
    **ROUTER_KEYS,
    **GRANITE.keys,
    "experts": ("num_local_experts",),
    "qkv_bias": ("attention_bias",),
}
# Granite 4's files keep experts, and the MLP beside them, in the same way.
GRANITE_MOE = ModelFamily(_read, _DEFAULTS, _write, GRANITE_HYBRID.tensors, _KEYS)
GRANITE_MOE_SHARED = ModelFamily(
    _read_shared,
    {**_DEFAULTS, "shared_intermediate_size": 0},
    _write_shared,
    GRANITE_HYBRID.tensors,
    {**_KEYS, "shared_ffn": ("shared_intermediate_size",)},
)
