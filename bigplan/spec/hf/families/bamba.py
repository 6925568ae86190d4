"""Bamba: a Llama most of whose blocks have Mamba-2 in place of attention."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
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
from bigplan.spec.hf.families.mixers import attention_at, mixer_fields
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import ATTENTION, STATE_SPACE
from bigplan.spec.model import ModelSpec

_PLACES = "attn_layer_indices"


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.get("z_loss_coefficient"):
        reader.refuse("z_loss_coefficient", "0: the loss is the cross-entropy alone")
    own = read_attention_bias(reader) | {"mlp_bias": reader.flag("mlp_bias")}
    mixers = attention_at(reader, _PLACES, STATE_SPACE)
    space = mixer_fields(mixers, STATE_SPACE, lambda: read_state_space(reader))
    return read_llama_like(reader) | own | space


def _write(model: ModelSpec) -> dict[str, Any]:
    return (
        write_llama_like(model, "bamba", "BambaForCausalLM")
        | write_state_space(model)
        | {
            "partial_rotary_factor": model.rotary_fraction,
            "attention_bias": model.qkv_bias,
            "mlp_bias": model.mlp_bias,
            _PLACES: [n for n, mixer in enumerate(model.mixers) if mixer == ATTENTION],
            **NO_TOKENS,
        }
    )


_WITHIN = "model.layers.{}"
_MLP = ("gate_proj", "up_proj", "down_proj")
BAMBA = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | MAMBA_DEFAULTS
    | {
        "vocab_size": 128000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,  # which transformers has for every file
        "mlp_bias": False,
        "z_loss_coefficient": 0.0,
        _PLACES: None,
    },
    _write,
    Tensors(
        {
            **LLAMA_TENSORS.names,
            **mamba_names(f"{_WITHIN}.mamba"),
            **{name: f"{_WITHIN}.feed_forward.{name}" for name in _MLP},
            "post_norm": f"{_WITHIN}.pre_ff_layernorm",
            "norm": "model.final_layernorm",
        },
        fused=MAMBA_FUSED,
    ),
    LLAMA_KEYS | MAMBA_KEYS | {"mixer_pattern": (_PLACES,), "qkv_bias": ("attention_bias",)},
)
