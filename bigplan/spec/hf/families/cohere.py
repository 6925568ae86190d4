"""Cohere (Command R) and Cohere 2 (Command R7B): attention and MLP in parallel after one norm.

Cohere Compass (North Micro Vision) has a Cohere 2, whose files tell rope by kind of block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.layer_types import layer_types, read_ropes, write_ropes
from bigplan.spec.hf.families.llama import (
    ATTENTION_BIAS,
    LAYER_NORM,
    LLAMA_LIKE,
    LLAMA_TENSORS,
    OF_RMSNORM,
)
from bigplan.spec.hf.families.parts import always, numbers, off, written
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

COHERE = LLAMA_LIKE.like(
    "cohere",
    "CohereForCausalLM",
    {
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_qk_norm": False,
    },
    off("use_qk_norm", "false: its LayerNorm has weights of its own for each head"),
    LAYER_NORM,
    always(norm_bias=False, parallel_residual=True, shared_norm=True),
    ATTENTION_BIAS,
    numbers(logit_scale="logit_scale"),
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but({}, without=("post_norm",), paired=("q_proj", "k_proj")),
    without=OF_RMSNORM,
)
_EVERY = "sliding_window_pattern"
_SECOND = COHERE.like(
    "cohere2",
    "Cohere2ForCausalLM",
    {"rope_theta": 10000.0, "sliding_window": 4096, _EVERY: 4},
    layer_types(lambda reader, block: (block + 1) % reader.count(_EVERY) > 0, _EVERY),
)


def _read_second(reader: ConfigReader) -> dict[str, Any]:
    """Rope turns nothing in blocks without a window."""
    fields = _SECOND.read(reader)
    if fields["sliding_window"] is None:
        reader.refuse("sliding_window", "a number of tokens, and a block that has it")
    return fields | ({"global_rope": False} if "attention_pattern" in fields else {})


COHERE2 = replace(_SECOND, read=_read_second)
_ROPES, _FULL, _SLIDING = "rope_parameters", "full_attention", "sliding_attention"


_COMPASS = COHERE.like(
    "cohere_compass_text",
    "CohereCompassForCausalLM",
    {"rope_theta": 10000.0, "sliding_window": 4096, "logit_scale": None},
    layer_types(lambda reader, block: False),
    tensors=COHERE.tensors.but({}, paired=()),
)


def _read_compass(reader: ConfigReader) -> dict[str, Any]:
    """Rope of blocks without a window may be null: it turns nothing there."""
    if reader.get("logit_scale") is None:
        reader = reader.saying({"logit_scale": 1.0})
    fields = read_ropes(reader, _COMPASS.read(reader), reader.number("rope_theta"))
    slides = fields["sliding_window"] is not None
    far, ropes = not slides or "attention_pattern" in fields, reader.mapping(_ROPES)
    if slides and not ropes.get(_SLIDING):
        reader.refuse(_ROPES, f"{_SLIDING}, by which rope turns blocks with a window")
    if far and _FULL not in ropes:
        reader.refuse(_ROPES, f"{_FULL}, which may be null")
    return fields | ({"global_rope": False} if far and ropes[_FULL] is None else {})


def _write_compass(model: ModelSpec) -> dict[str, Any]:
    config = write_ropes(_COMPASS.write(model), model)
    if not model.global_rope:
        config[_ROPES] = config[_ROPES] | {_FULL: None}
    return config


COHERE_COMPASS_TEXT = replace(_COMPASS, read=_read_compass, write=_write_compass)
