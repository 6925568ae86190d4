"""Arcee and Nemotron, whose MLP is a squared ReLU between two matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_SQUARED = {"relu2": "relu2"}
_ARCEE = LLAMA_DEFAULTS | {
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "relu2",
    "mlp_bias": False,
}
_NEMOTRON = _ARCEE | {
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 48,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    return read_llama_like(reader, _SQUARED) | {
        **read_attention_bias(reader),
        "mlp_bias": reader.flag("mlp_bias"),
    }


def _read_nemotron(reader: ConfigReader) -> dict[str, Any]:
    return _read(reader) | {
        "norm": "layernorm",
        "norm_epsilon": reader.get("norm_eps"),
        "norm_plus_one": True,
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return _written(model, "arcee", "ArceeForCausalLM")


def _written(model: ModelSpec, model_type: str, architecture: str) -> dict[str, Any]:
    return write_llama_like(model, model_type, architecture) | {
        "hidden_act": "relu2",
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
        **NO_TOKENS,
    }


def _write_nemotron(model: ModelSpec) -> dict[str, Any]:
    config = _written(model, "nemotron", "NemotronForCausalLM")
    del config["rms_norm_eps"]
    return config | {
        "norm_eps": model.norm_epsilon,
        "partial_rotary_factor": model.rotary_fraction,
    }


_NAMES = {name: there for name, there in LLAMA_TENSORS.names.items() if name != "gate_proj"}
_TENSORS = replace(LLAMA_TENSORS, names=_NAMES)
ARCEE = ModelFamily(_read, _ARCEE, _write, _TENSORS, LLAMA_KEYS)
NEMOTRON = ModelFamily(
    _read_nemotron,
    _NEMOTRON,
    _write_nemotron,
    _TENSORS,
    LLAMA_KEYS | {"norm_epsilon": ("norm_eps",)},
)
