"""Youtu-LLM: DeepSeek-V3's latent attention, without experts."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.deepseek import DEEPSEEK_V3, read_deepseek, write_deepseek
from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_DENSE = "first_k_dense_replace"  # which these files do not have


def _read(reader: ConfigReader) -> dict[str, Any]:
    return read_deepseek(reader.saying({_DENSE: reader.count("num_hidden_layers")}))


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_deepseek(model, "youtu", "YoutuForCausalLM")
    config.pop(_DENSE)
    told = {key: value for key, value in config.items() if "predict" not in key}
    return {**told, **NO_TOKENS}


_OF_EXPERTS = ("router", "experts.", "shared.")
YOUTU = ModelFamily(
    _read,
    {
        **DEEPSEEK_V3.defaults,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    _write,
    DEEPSEEK_V3.tensors.but(
        {},
        without=[name for name in DEEPSEEK_V3.tensors.names if name.startswith(_OF_EXPERTS)],
    ),
    {"latent_attention": DEEPSEEK_V3.keys["latent_attention"]},
)
