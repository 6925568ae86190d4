"""StarCoder2: a Llama with LayerNorm and biases, whose MLP is GELU between two matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_DEFAULTS = LLAMA_DEFAULTS | {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "hidden_act": "gelu_pytorch_tanh",
    "use_bias": True,
    "tie_word_embeddings": True,
    "sliding_window": None,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    return read_llama_like(reader, GELUS) | {
        "norm": "layernorm",
        "norm_epsilon": reader.get("norm_epsilon"),
        **read_bias(reader),
        "sliding_window": reader.optional_count("sliding_window"),
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "starcoder2", "Starcoder2ForCausalLM")
    del config["rms_norm_eps"]
    return config | {
        "norm_epsilon": model.norm_epsilon,
        "hidden_act": "gelu" if model.mlp == "gelu" else "gelu_pytorch_tanh",
        "use_bias": model.qkv_bias,
        "sliding_window": model.sliding_window,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        **NO_TOKENS,
    }


_NAMES = {
    **{name: there for name, there in LLAMA_TENSORS.names.items() if name != "gate_proj"},
    "up_proj": "model.layers.{}.mlp.c_fc",
    "down_proj": "model.layers.{}.mlp.c_proj",
}
STARCODER2 = ModelFamily(
    _read,
    _DEFAULTS,
    _write,
    replace(LLAMA_TENSORS, names=_NAMES),
    LLAMA_KEYS | {"norm_epsilon": ("norm_epsilon",), "qkv_bias": ("use_bias",)},
)
