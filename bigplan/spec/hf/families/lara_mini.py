"""Lara 4 Mini: Qwen3.5's blocks with experts, and windows in some of those with attention.

Rope turns nothing in blocks without a window. Neither attention nor the shared expert has a gate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.delta_rule_steps import DECAYS, GATES, KEYS, NORM, QUERIES, RATES, VALUES
from bigplan.spec.hf.families.experts import FIRST, LAST, NORMALISED, stacked_names
from bigplan.spec.hf.families.layer_types import kinds_of_blocks, layer_types, turned_by_windows
from bigplan.spec.hf.families.parts import always
from bigplan.spec.hf.families.qwen3_5 import QWEN3_5_MOE
from bigplan.spec.hf.families.qwen3_next import CONVOLVED
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import DELTA_RULE
from bigplan.spec.model import ModelSpec

_TYPES, _LINEAR = "layer_types", "linear_attention"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_EVERY = (_LINEAR, _SLIDING, _LINEAR, _FULL, _SLIDING)
_WINDOW = 512
_WINDOWS = turned_by_windows(layer_types(lambda reader, block: False))
_RULE = (QUERIES, KEYS, VALUES, GATES, RATES, DECAYS)
_WITHIN = "model.layers.{}"
_EXPERTS = f"{_WITHIN}.mlp.experts"
_MODULES = QWEN3_5_MOE.tensors.but(
    stacked_names(f"{_EXPERTS}.gate_up_proj", f"{_EXPERTS}.down_proj"),
    without=("q_gate_proj", "shared_gate", *FIRST, LAST),
    fused=((QUERIES, KEYS, VALUES), CONVOLVED, FIRST),
    transposed=(f"{LAST}.weight",),
    grouped={},
)
_LARA_MINI = QWEN3_5_MOE.like(
    "lara_mini",
    "LaraMiniForCausalLM",
    {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "num_hidden_layers": 34,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "partial_rotary_factor": 1.0,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "num_experts_per_tok": 4,
        "num_experts": 128,
        "norm_topk_prob": True,
        "sliding_window": _WINDOW,
    },
    NORMALISED,
    always(norm_plus_one=False, attention_gate=False, shared_gate=False),
    tensors=_MODULES,
).published_as(
    _MODULES.but(
        {
            **dict.fromkeys(_RULE, f"{_WITHIN}.linear_attn.in_proj"),
            NORM.removesuffix(".weight"): f"{_WITHIN}.linear_attn.out_norm",
        },
        fused=(_RULE, CONVOLVED, FIRST),
    )
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Mixers and windows by the words of blocks; those with a delta rule count as local."""
    blocks = reader.count("num_hidden_layers")
    words = {word: word for word in (_LINEAR, _SLIDING, _FULL)}
    types = kinds_of_blocks(reader, words, blocks) or [_EVERY[n % 5] for n in range(blocks)]
    local = _SLIDING if _SLIDING in types else _FULL
    mixers = [_FULL if word == _SLIDING else word for word in types]
    windows = [local if word == _LINEAR else word for word in types]
    return _LARA_MINI.read(reader.saying({_TYPES: mixers})) | _WINDOWS.read(
        reader.saying({_TYPES: windows})
    )


def _write(model: ModelSpec) -> dict[str, Any]:
    blocks = zip(model.mixers, model.attentions, strict=True)
    return _LARA_MINI.write(model) | {
        "sliding_window": model.sliding_window or _WINDOW,
        _TYPES: [
            _LINEAR if mixer == DELTA_RULE else _FULL if one.window is None else _SLIDING
            for mixer, one in blocks
        ],
    }


LARA_MINI = replace(
    _LARA_MINI,
    read=_read,
    write=_write,
    keys={**_LARA_MINI.keys, "mixer_pattern": (_TYPES,), "attention_pattern": (_TYPES,)},
)
