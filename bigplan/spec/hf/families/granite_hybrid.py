"""Granite 4: blocks of Mamba-2 or of attention without positions, with Granite's factors."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.families.granite import GRANITE, read_factors, write_factors
from bigplan.spec.hf.families.layer_types import kinds_of_blocks
from bigplan.spec.hf.families.llama import (
    LLAMA_TENSORS,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.families.mamba import (
    MAMBA_DEFAULTS,
    MAMBA_FUSED,
    MAMBA_KEYS,
    mamba_names,
    read_state_space,
    write_state_space,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import ATTENTION, STATE_SPACE
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import compact_words

_WORDS = {
    "attention": ATTENTION,
    "mamba": STATE_SPACE,
    "full_attention": ATTENTION,
    "linear_attention": STATE_SPACE,
}
_TYPES = {ATTENTION: "attention", STATE_SPACE: "mamba"}


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.optional_count("num_local_experts", least=0):
        reader.refuse("num_local_experts", "0: what experts add is not scaled")
    fields = read_llama_like(reader) | read_attention_bias(reader) | read_factors(reader)
    if reader.get("position_embedding_type") != "rope":
        fields |= {"positions": "none", "rope_scaling": None}
    return fields | _read_mixers(reader) | {"ffn": reader.count("shared_intermediate_size")}


def _read_mixers(reader: ConfigReader) -> dict[str, Any]:
    blocks = reader.count("num_hidden_layers")
    mixers = kinds_of_blocks(reader, _WORDS, blocks) or [STATE_SPACE] * blocks
    if STATE_SPACE not in mixers:
        return {}
    pattern = compact_words(mixers) if ATTENTION in mixers else []
    return {"state_space": read_state_space(reader), "mixer_pattern": pattern}


def _write(model: ModelSpec) -> dict[str, Any]:
    return (
        write_llama_like(model, "granitemoehybrid", "GraniteMoeHybridForCausalLM")
        | write_factors(model)
        | write_state_space(model)
        | {
            "attention_bias": model.qkv_bias,
            "position_embedding_type": "rope" if model.positions == "rope" else "nope",
            "layer_types": [_TYPES.get(mixer, "attention") for mixer in model.mixers],
            "shared_intermediate_size": model.ffn,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            **NO_TOKENS,
        }
    )


_WITHIN = "model.layers.{}"
_WIDENING = ("gate_proj", "up_proj")
GRANITE_HYBRID = ModelFamily(
    _read,
    GRANITE.defaults
    | MAMBA_DEFAULTS
    | {
        "num_local_experts": 8,
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
    },
    _write,
    Tensors(
        {
            **LLAMA_TENSORS.names,
            **mamba_names(f"{_WITHIN}.mamba"),
            **dict.fromkeys(_WIDENING, f"{_WITHIN}.shared_mlp.input_linear"),
            "down_proj": f"{_WITHIN}.shared_mlp.output_linear",
        },
        fused=(*MAMBA_FUSED, _WIDENING),
    ),
    GRANITE.keys
    | MAMBA_KEYS
    | {
        "ffn": ("shared_intermediate_size",),
        "experts": ("num_local_experts",),
        "experts_per_token": ("num_experts_per_tok",),
        "router_loss": ("router_aux_loss_coef",),
        "mixer_pattern": ("layer_types",),
        "positions": ("position_embedding_type",),
        "qkv_bias": ("attention_bias",),
    },
)
