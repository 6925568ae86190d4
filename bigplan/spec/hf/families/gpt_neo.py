"""GPT-Neo: a GPT-2 whose scores are not scaled, and every other block of which has a window."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, Tensors, family
from bigplan.spec.hf.families.parts import (
    Part,
    activation,
    always,
    counts,
    flags,
    inner_width,
    values,
    written,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import GLOBAL, LOCAL, compact

_WITHIN = "transformer.h.{}.attn.attention"
_TENSORS = Tensors(
    {
        "embed_tokens": "transformer.wte",
        "embed_positions": "transformer.wpe",
        "input_norm": "transformer.h.{}.ln_1",
        "q_proj": f"{_WITHIN}.q_proj",
        "k_proj": f"{_WITHIN}.k_proj",
        "v_proj": f"{_WITHIN}.v_proj",
        "o_proj": f"{_WITHIN}.out_proj",
        "post_norm": "transformer.h.{}.ln_2",
        "up_proj": "transformer.h.{}.mlp.c_fc",
        "down_proj": "transformer.h.{}.mlp.c_proj",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
    }
)
_TYPES = "attention_types"
_USUAL: Any = [[[GLOBAL, LOCAL], 12]]


def _read_windows(reader: ConfigReader) -> dict[str, Any]:
    local = _local_blocks(reader, reader.count("num_layers"))
    windows: dict[str, Any] = {"sliding_window": reader.count("window_size")} if any(local) else {}
    if windows and not all(local):
        windows["attention_pattern"] = compact(local)
    return windows


def _local_blocks(reader: ConfigReader, layers: int) -> list[bool]:
    """Whether each block has the window: words of `attention_types`, each list so many times."""
    runs = reader.get(_TYPES)
    runs = _USUAL if runs is None else runs
    try:
        words = [word for once, times in runs for _ in range(times) for word in once]
    except (TypeError, ValueError):  # not pairs of a list and a number
        words = []
    if len(words) != layers or not {*words} <= {GLOBAL, LOCAL}:
        reader.refuse(_TYPES, f"[[words, times], ...] with {GLOBAL} or {LOCAL} for each block")
    return [word == LOCAL for word in words]


def _write_windows(model: ModelSpec) -> dict[str, Any]:
    words = [GLOBAL if one.window is None else LOCAL for one in model.attentions]
    width = {} if model.sliding_window is None else {"window_size": model.sliding_window}
    return {_TYPES: [[words, 1]], **width}


_WINDOWS = {"sliding_window": ("window_size",), "attention_pattern": (_TYPES,)}
GPT_NEO = family(
    "gpt_neo",
    "GPTNeoForCausalLM",
    {
        "vocab_size": 50257,
        "max_position_embeddings": 2048,
        "hidden_size": 2048,
        "num_layers": 24,
        "num_heads": 16,
        _TYPES: _USUAL,
        "window_size": 256,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    activation("activation_function", GELUS, "gelu_new"),
    counts(
        layers="num_layers",
        hidden="hidden_size",
        heads="num_heads",
        vocab="vocab_size",
        max_sequence_length="max_position_embeddings",
    ),
    inner_width("intermediate_size", "hidden_size"),
    Part(_read_windows, _write_windows, _WINDOWS),
    values(norm_epsilon="layer_norm_epsilon"),
    always(norm="layernorm", positions="learned", score_scale=1.0),
    always(attention_output_bias=True, mlp_bias=True),
    flags(tied_embeddings="tie_word_embeddings"),
    written({"attention_dropout": 0.0, "embed_dropout": 0.0, "resid_dropout": 0.0, **NO_TOKENS}),
    tensors=_TENSORS,
)
