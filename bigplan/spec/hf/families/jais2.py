"""Jais 2: Nemotron's MLP and plain layer norms, with biases everywhere."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.arcee import ARCEE
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    own = {"norm": "layernorm", "norm_epsilon": reader.get("layer_norm_eps")}
    return ARCEE.read(reader) | own


def _write(model: ModelSpec) -> dict[str, Any]:
    config = ARCEE.write(model)
    del config["rms_norm_eps"]
    named = {"model_type": "jais2", "architectures": ["Jais2ForCausalLM"]}
    return config | named | {"layer_norm_eps": model.norm_epsilon}


JAIS2 = ModelFamily(
    _read,
    {
        **ARCEE.defaults,
        "vocab_size": 150272,
        "hidden_size": 3328,
        "intermediate_size": 26624,
        "num_hidden_layers": 32,
        "num_attention_heads": 26,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    _write,
    ARCEE.tensors,
    {**ARCEE.keys, "norm_epsilon": ("layer_norm_eps",)},
)
