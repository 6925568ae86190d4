"""Granite 4: blocks of Mamba-2, or of attention without positions, some models with experts."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.experts import FIRST, ROUTER, stacked_names
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.granite import FACTORS, GRANITE
from bigplan.spec.hf.families.layer_types import kinds_of_blocks
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, LLAMA_TENSORS
from bigplan.spec.hf.families.mamba import (
    MAMBA_DEFAULTS,
    MAMBA_FUSED,
    MAMBA_KEYS,
    mamba_names,
    read_state_space,
    write_state_space,
)
from bigplan.spec.hf.families.mixers import mixer_fields
from bigplan.spec.hf.families.parts import Part, written
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import ATTENTION, STATE_SPACE
from bigplan.spec.model import ModelSpec

_WORDS = {
    "attention": ATTENTION,
    "mamba": STATE_SPACE,
    "full_attention": ATTENTION,
    "linear_attention": STATE_SPACE,
}
_TYPES = {ATTENTION: "attention", STATE_SPACE: "mamba"}


def _read_positions(reader: ConfigReader) -> dict[str, Any]:
    if reader.get("position_embedding_type") == "rope":
        return {}
    return {"positions": "none", "rope_scaling": None}


def _write_positions(model: ModelSpec) -> dict[str, Any]:
    return {"position_embedding_type": "rope" if model.positions == "rope" else "nope"}


def _read_mlps(reader: ConfigReader) -> dict[str, Any]:
    """The shared MLP is the only one where there are no experts."""
    shared, experts = (
        reader.count("shared_intermediate_size"),
        reader.optional_count("num_local_experts", least=0),
    )
    if not experts:
        return {"ffn": shared}
    return ROUTER.read(reader) | {"experts": experts, "shared_ffn": shared}


def _write_mlps(model: ModelSpec) -> dict[str, Any]:
    return ROUTER.write(model) | {
        "shared_intermediate_size": model.shared_ffn or model.ffn,
        "num_local_experts": model.experts,
    }


def _read_mixers(reader: ConfigReader) -> dict[str, Any]:
    blocks = reader.count("num_hidden_layers")
    mixers = kinds_of_blocks(reader, _WORDS, blocks) or [STATE_SPACE] * blocks
    return mixer_fields(mixers, STATE_SPACE, lambda: read_state_space(reader))


def _write_mixers(model: ModelSpec) -> dict[str, Any]:
    types = [_TYPES.get(mixer, "attention") for mixer in model.mixers]
    return write_state_space(model) | {"layer_types": types}


def _experts(model: ModelSpec) -> int:
    return max(1, model.experts)


_WITHIN = "model.layers.{}"
_SHARED, _ROUTED = f"{_WITHIN}.shared_mlp", f"{_WITHIN}.block_sparse_moe"
# The MLP that all tokens pass, by both of its names here.
_WIDENING = tuple((f"{of}gate_proj", f"{of}up_proj") for of in ("", "shared."))
_MLPS = {
    **ROUTER.keys,
    "experts": ("num_local_experts",),
    "shared_ffn": ("shared_intermediate_size",),
}
GRANITE_HYBRID = LLAMA_LIKE.like(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    {
        **GRANITE.defaults,
        **MAMBA_DEFAULTS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
    },
    ATTENTION_BIAS,
    FACTORS,
    Part(_read_positions, _write_positions, {"positions": ("position_embedding_type",)}),
    Part(_read_mixers, _write_mixers, MAMBA_KEYS | {"mixer_pattern": ("layer_types",)}),
    Part(_read_mlps, _write_mlps, _MLPS),
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but(
        {
            **mamba_names(f"{_WITHIN}.mamba"),
            **{name: f"{_SHARED}.input_linear" for pair in _WIDENING for name in pair},
            **dict.fromkeys(("down_proj", "shared.down_proj"), f"{_SHARED}.output_linear"),
            "router": f"{_ROUTED}.router.layer",
            **stacked_names(f"{_ROUTED}.input_linear.weight", f"{_ROUTED}.output_linear.weight"),
        },
        # Files have one matrix [out, in] of each expert, gate above up.
        transposed=("experts.down_proj.weight",),
        fused=(*MAMBA_FUSED, *_WIDENING, FIRST),
        grouped=dict.fromkeys(FIRST, _experts),
    ),
)
