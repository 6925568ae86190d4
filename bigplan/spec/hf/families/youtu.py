"""Youtu-LLM: DeepSeek-V3's latent attention, without experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.deepseek import DEEPSEEK_V3, read_deepseek, write_deepseek
from bigplan.spec.hf.families.dense_blocks import FIRST, first_ones
from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    blocks = reader.count("num_hidden_layers")
    return read_deepseek(reader, first_ones(blocks, blocks))


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_deepseek(model, "youtu", "YoutuForCausalLM")
    config.pop(FIRST)  # which these files do not have
    told = {key: value for key, value in config.items() if "predict" not in key}
    return {**told, **NO_TOKENS}


_OF_EXPERTS = ("router", "experts.", "shared.")
_NAMES = {
    name: there
    for name, there in DEEPSEEK_V3.tensors.names.items()
    if not name.startswith(_OF_EXPERTS)
}
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
    replace(DEEPSEEK_V3.tensors, names=_NAMES),
    {"latent_attention": DEEPSEEK_V3.keys["latent_attention"]},
)
