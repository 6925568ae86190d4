"""LFM3: an LFM2 with norms around, windows in some blocks, and a gate for each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.layer_types import kinds_of_blocks, ropes_by_kind
from bigplan.spec.hf.families.lfm2 import CONVOLUTIONS, LFM2
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, OF_RMSNORM
from bigplan.spec.hf.families.mixers import mixer_fields
from bigplan.spec.hf.families.parts import Part, always, values, written
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import ATTENTION, CONVOLUTION
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import compact

_FULL, _SLIDING, _CONV = "full_attention", "sliding_attention", "conv"
_LOCAL_BASE = 10000.0
_ROPES = {
    _SLIDING: {"rope_type": "default", "rope_theta": _LOCAL_BASE},
    _FULL: {
        "rope_type": "proportional",
        "rope_theta": 1000000.0,
        "partial_rotary_factor": 0.5,
    },
}
# Of four blocks, where a file does not list them; the first of all has a convolution.
_EVERY = (_SLIDING, _CONV, _FULL, _CONV)


def _read_types(reader: ConfigReader) -> dict[str, Any]:
    """Mixers and windows by the words of blocks; those with a convolution count as local."""
    blocks = reader.count("num_hidden_layers")
    words = {word: word for word in (_CONV, _FULL, _SLIDING)}
    types = kinds_of_blocks(reader, words, blocks) or [
        _EVERY[block % 4] if block else _CONV for block in range(blocks)
    ]
    mixers = [CONVOLUTION if word == _CONV else ATTENTION for word in types]
    described = CONVOLUTIONS.read(reader)
    fields = mixer_fields(mixers, CONVOLUTION, lambda: described)
    fields["sliding_window"] = reader.count("sliding_window") if _SLIDING in types else None
    if {_SLIDING, _FULL} <= {*types}:
        fields["attention_pattern"] = compact([word != _FULL for word in types])
    return fields


def _write_types(model: ModelSpec) -> dict[str, Any]:
    blocks = zip(model.mixers, model.attentions, strict=True)
    window = model.sliding_window
    return {
        **CONVOLUTIONS.write(model),
        **({} if window is None else {"sliding_window": window}),
        "layer_types": [
            _CONV if mixer == CONVOLUTION else _FULL if one.window is None else _SLIDING
            for mixer, one in blocks
        ],
    }


def _read_switches(reader: ConfigReader) -> dict[str, Any]:
    gate = reader.flag("use_attention_gate")
    return {
        "norms": "around" if reader.flag("use_sandwich_norm") else "before",
        "attention_gate": gate,
        "gate_of_heads": gate,
    }


def _write_switches(model: ModelSpec) -> dict[str, Any]:
    return {
        "use_sandwich_norm": model.norms == "around",
        "use_attention_gate": model.attention_gate,
    }


_WITHIN, _GATE = "model.layers.{}", "q_gate_proj"
_KEYS = {
    **CONVOLUTIONS.keys,
    "mixer_pattern": ("layer_types",),
    "attention_pattern": ("layer_types",),
}
_SWITCHES = {"norms": ("use_sandwich_norm",), "attention_gate": ("use_attention_gate",)}
_LFM3 = LLAMA_LIKE.like(
    "lfm3",
    "Lfm3ForCausalLM",
    {
        **LFM2.defaults,
        "vocab_size": 128000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "rope_parameters": _ROPES,
    },
    ATTENTION_BIAS,
    Part(_read_types, _write_types, _KEYS),
    Part(_read_switches, _write_switches, _SWITCHES),
    values(norm_epsilon="norm_eps"),
    always(qk_norm=True),
    written(NO_TOKENS),
    tensors=LFM2.tensors.but(
        {
            _GATE: f"{_WITHIN}.self_attn.g_proj",
            "q_norm": f"{_WITHIN}.self_attn.q_norm",
            "k_norm": f"{_WITHIN}.self_attn.k_norm",
            "o_proj": f"{_WITHIN}.self_attn.o_proj",
            "attention_closing_norm": f"{_WITHIN}.post_operator_norm",
            "convolution_closing_norm": f"{_WITHIN}.post_operator_norm",
            "mlp_closing_norm": f"{_WITHIN}.post_ffn_norm",
        }
    ),
    without=(*OF_RMSNORM, "hidden_act"),
)
_PUBLISHED = _LFM3.published_as(_LFM3.tensors.but({_GATE: f"{_WITHIN}.self_attn.gate_proj"}))


_WITH_ROPES = ropes_by_kind(_PUBLISHED, lambda reader: _LOCAL_BASE)


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.mapping("rope_parameters") == {}:  # null, too, means the class's own
        reader = reader.saying({"rope_parameters": _ROPES})
    return _WITH_ROPES.read(reader)


LFM3 = replace(_WITH_ROPES, read=_read)
