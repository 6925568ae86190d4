"""Qwen2, with biases of queries, keys and values, and Qwen3, with norms of queries and keys."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.layer_types import layer_types
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE
from bigplan.spec.hf.families.parts import Part, always
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _slides(reader: ConfigReader, block: int) -> bool:
    """From max_window_layers on, where the file does not list the blocks."""
    first = reader.count("max_window_layers", least=0)
    return reader.flag("use_sliding_window") and block >= first


def _write_window(model: ModelSpec) -> dict[str, Any]:
    slides = model.sliding_window is not None
    return {"use_sliding_window": slides, "max_window_layers": 0 if slides else model.layers}


_QWEN = LLAMA_LIKE.like(
    "qwen2",
    "Qwen2ForCausalLM",
    {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    layer_types(_slides),
    Part(write=_write_window),
)
QWEN2 = _QWEN.like("qwen2", "Qwen2ForCausalLM", {}, always(qkv_bias=True))
QWEN3 = _QWEN.like(
    "qwen3", "Qwen3ForCausalLM", {"head_dim": 128}, ATTENTION_BIAS, always(qk_norm=True)
)
