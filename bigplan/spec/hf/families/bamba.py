"""Bamba: a Llama most of whose blocks have Mamba-2 in place of attention."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.experts import DENSE
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, LLAMA_TENSORS, MLP_BIAS
from bigplan.spec.hf.families.mamba import (
    MAMBA_DEFAULTS,
    MAMBA_FUSED,
    MAMBA_KEYS,
    mamba_names,
    read_state_space,
    write_state_space,
)
from bigplan.spec.hf.families.mixers import attention_at, mixer_fields
from bigplan.spec.hf.families.parts import Part, empty, written
from bigplan.spec.hf.families.rope import PARTLY_TURNED
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import ATTENTION, STATE_SPACE
from bigplan.spec.model import ModelSpec

_PLACES = "attn_layer_indices"


def _read_mixers(reader: ConfigReader) -> dict[str, Any]:
    mixers = attention_at(reader, _PLACES, STATE_SPACE)
    return mixer_fields(mixers, STATE_SPACE, lambda: read_state_space(reader))


def _write_mixers(model: ModelSpec) -> dict[str, Any]:
    places = [n for n, mixer in enumerate(model.mixers) if mixer == ATTENTION]
    return write_state_space(model) | {_PLACES: places}


_WITHIN = "model.layers.{}"
BAMBA_TENSORS = LLAMA_TENSORS.but(
    {
        **mamba_names(f"{_WITHIN}.mamba"),
        **{name: f"{_WITHIN}.feed_forward.{name}" for name in DENSE},
        "post_norm": f"{_WITHIN}.pre_ff_layernorm",
        "norm": "model.final_layernorm",
    },
    fused=MAMBA_FUSED,
)
BAMBA = LLAMA_LIKE.like(
    "bamba",
    "BambaForCausalLM",
    MAMBA_DEFAULTS
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
    empty("z_loss_coefficient", "0: the loss is the cross-entropy alone"),
    ATTENTION_BIAS,
    MLP_BIAS,
    Part(_read_mixers, _write_mixers, MAMBA_KEYS | {"mixer_pattern": (_PLACES,)}),
    PARTLY_TURNED,
    written(NO_TOKENS),
    tensors=BAMBA_TENSORS,
)
