"""StableLM: a Llama with LayerNorm, whose rope turns a quarter of each head."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    for key, why in (
        ("qk_layernorm", "false: its LayerNorm has weights of its own for each head"),
        ("use_parallel_residual", "false: attention and MLP would share one norm"),
    ):
        if reader.flag(key):
            reader.refuse(key, why)
    return read_llama_like(reader) | {
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_eps"),
        "qkv_bias": reader.flag("use_qkv_bias"),
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "stablelm", "StableLmForCausalLM")
    del config["rms_norm_eps"]
    return config | {
        "layer_norm_eps": model.norm_epsilon,
        "partial_rotary_factor": model.rotary_fraction,
        "use_qkv_bias": model.qkv_bias,
        "hidden_dropout": 0.0,
    }


STABLELM = ModelFamily(
    _read,
    _DEFAULTS,
    _write,
    LLAMA_TENSORS,
    LLAMA_KEYS | {"norm_epsilon": ("layer_norm_eps",), "qkv_bias": ("use_qkv_bias",)},
)
