"""Falcon-H1: attention and Mamba-2 side by side in each block, with factors nearly everywhere.

Factors of what a linear product reads or gives are taken together: scores have one, and so has what
attention adds. Those of the first product of Mamba-2 are `scales` of its state space.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from bigplan.spec.hf.families.bamba import BAMBA_TENSORS
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, MLP_BIAS
from bigplan.spec.hf.families.mamba import (
    MAMBA_DEFAULTS,
    MAMBA_KEYS,
    read_state_space,
    write_state_space,
)
from bigplan.spec.hf.families.parts import Part, written
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import AttentionBeside, StateSpace
from bigplan.spec.model import ModelSpec

_WIDTH = "mamba_d_ssm"
_NORM, _NORM_FIRST = "mamba_rms_norm", "mamba_norm_before_gate"
_OUTPUT_BIAS = "projectors_bias"
_OF_SPACE, _OF_MLP = "ssm_multipliers", "mlp_multipliers"
# Factors of what products with biases read: a bias is behind them.
_BEFORE = {"attention_in_multiplier": "attention_bias", "ssm_in_multiplier": "mamba_proj_bias"}


def _read_factors(reader: ConfigReader) -> dict[str, Any]:
    _refuse_unlike(reader)
    usual = reader.count("hidden_size") // reader.count("num_attention_heads")
    head_dim = reader.optional_count("head_dim") or usual
    read, keys = reader.number("attention_in_multiplier"), reader.number("key_multiplier")
    gate, mlp = _factors(reader, _OF_MLP, 2)
    scores = read * read * keys
    return {
        "state_space": _read_space(reader),
        "attention_beside": {
            "attention_scale": read * reader.number("attention_out_multiplier"),
            "other_scale": reader.number("ssm_out_multiplier"),
        },
        "score_scale": None if scores == 1 else scores / sqrt(max(1, head_dim)),  # 0: no model
        "gate_scale": gate,
        "mlp_scale": mlp,
        "embedding_scale": reader.number("embedding_multiplier"),
        "logit_scale": reader.number("lm_head_multiplier"),
    }


def _read_space(reader: ConfigReader) -> dict[str, Any]:
    each = _factors(reader, _OF_SPACE, 5)
    scales = [reader.number("ssm_in_multiplier") * one for one in each]
    return read_state_space(reader, reader.optional_count(_WIDTH)) | {
        "norm": reader.flag(_NORM),
        "scales": [] if scales == [1.0] * 5 else scales,
    }


def _factors(reader: ConfigReader, key: str, count: int) -> list[float]:
    """So many numbers above 0; 1 each where the key is null or absent."""
    found = reader.get(key)
    if found is None:
        return [1.0] * count
    numbers = isinstance(found, list) and all(type(one) in (int, float) for one in found)
    if not numbers or len(found) != count or min(found) <= 0:
        reader.refuse(key, f"{count} numbers above 0")
    return [float(one) for one in found]


def _refuse_unlike(reader: ConfigReader) -> None:
    """Norms before gates, and biases that a factor does not multiply as it does the product."""
    if reader.flag(_NORM) and reader.flag(_NORM_FIRST):
        reader.refuse(_NORM_FIRST, f"false beside {_NORM}: a gate is in front of the norm")
    if reader.flag(_OUTPUT_BIAS) != reader.flag("mamba_proj_bias"):
        reader.refuse(_OUTPUT_BIAS, "as mamba_proj_bias: both products of Mamba-2 or none")
    for factor, bias in _BEFORE.items():
        if reader.flag(bias) and reader.number(factor) != 1:
            reader.refuse(bias, f"false beside a {factor} other than 1")


def _write_factors(model: ModelSpec) -> dict[str, Any]:
    space = model.state_space or StateSpace(heads=1, head_dim=model.hidden)
    beside = model.attention_beside or AttentionBeside()
    return {
        **write_state_space(model),
        "mamba_expand": 2,  # which `mamba_d_ssm` has no need of
        _WIDTH: space.width,
        _NORM: space.norm,
        _NORM_FIRST: False,
        _OUTPUT_BIAS: space.bias,
        **dict.fromkeys(_BEFORE, 1.0),
        "key_multiplier": model.scale_of_scores * sqrt(model.head_dim),
        "attention_out_multiplier": beside.attention_scale,
        "ssm_out_multiplier": beside.other_scale,
        _OF_SPACE: list(space.scales) or None,
        _OF_MLP: [model.gate_scale, model.mlp_scale],
        "embedding_multiplier": model.embedding_scale,
        "lm_head_multiplier": model.logit_scale,
    }


_KEYS = MAMBA_KEYS | {
    "state_space.norm": (_NORM,),
    "state_space.scales": (_OF_SPACE,),
    "attention_beside": ("attention_out_multiplier", "ssm_out_multiplier"),
    "score_scale": ("key_multiplier",),
    "gate_scale": (_OF_MLP,),
    "embedding_scale": ("embedding_multiplier",),
    "logit_scale": ("lm_head_multiplier",),
}
FALCON_H1 = LLAMA_LIKE.like(
    "falcon_h1",
    "FalconH1ForCausalLM",
    MAMBA_DEFAULTS
    | {
        "vocab_size": 128000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
        _WIDTH: 1024,
        _NORM: False,
        _NORM_FIRST: True,
        _OUTPUT_BIAS: False,
        **dict.fromkeys((*_BEFORE, "key_multiplier", "attention_out_multiplier"), 1.0),
        **dict.fromkeys(("ssm_out_multiplier", "embedding_multiplier", "lm_head_multiplier"), 1.0),
        _OF_SPACE: None,
        _OF_MLP: None,
    },
    ATTENTION_BIAS,
    MLP_BIAS,
    Part(_read_factors, _write_factors, _KEYS),
    written(NO_TOKENS),
    tensors=BAMBA_TENSORS,
)
