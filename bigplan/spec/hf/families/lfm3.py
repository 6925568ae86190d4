"""LFM3: an LFM2 with norms around, windows in some blocks, and a gate for each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.layer_types import kinds_of_blocks, read_ropes, write_ropes
from bigplan.spec.hf.families.lfm2 import LFM2
from bigplan.spec.hf.families.llama import read_attention_bias, read_llama_like, write_llama_like
from bigplan.spec.hf.families.mixers import mixer_fields
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import ATTENTION, CONVOLUTION, ShortConvolution
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


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.mapping("rope_parameters") == {}:  # null, too, means the class's own
        reader = replace(reader, config={**reader.config, "rope_parameters": _ROPES})
    blocks = reader.count("num_hidden_layers")
    words = {word: word for word in (_CONV, _FULL, _SLIDING)}
    types = kinds_of_blocks(reader, words, blocks) or [
        _EVERY[block % 4] if block else _CONV for block in range(blocks)
    ]
    gate = reader.flag("use_attention_gate")
    fields = read_llama_like(reader) | read_attention_bias(reader) | _read_types(reader, types)
    return read_ropes(reader, fields, _LOCAL_BASE) | {
        "norm_epsilon": reader.get("norm_eps"),
        "norms": "around" if reader.flag("use_sandwich_norm") else "before",
        "qk_norm": True,
        "attention_gate": gate,
        "gate_of_heads": gate,
    }


def _read_types(reader: ConfigReader, types: list[str]) -> dict[str, Any]:
    """Mixers and windows by the words of blocks; those with a convolution count as local."""
    mixers = [CONVOLUTION if word == _CONV else ATTENTION for word in types]
    described = {"taps": reader.count("conv_L_cache"), "bias": reader.flag("conv_bias")}
    fields = mixer_fields(mixers, CONVOLUTION, lambda: described)
    fields["sliding_window"] = reader.count("sliding_window") if _SLIDING in types else None
    if {_SLIDING, _FULL} <= {*types}:
        fields["attention_pattern"] = compact([word != _FULL for word in types])
    return fields


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "lfm3", "Lfm3ForCausalLM")
    del config["rms_norm_eps"], config["hidden_act"]
    conv = model.convolution or ShortConvolution()
    blocks = zip(model.mixers, model.attentions, strict=True)
    if model.sliding_window is not None:
        config["sliding_window"] = model.sliding_window
    return write_ropes(config, model) | {
        "norm_eps": model.norm_epsilon,
        "layer_types": [
            _CONV if mixer == CONVOLUTION else _FULL if one.window is None else _SLIDING
            for mixer, one in blocks
        ],
        "conv_L_cache": conv.taps,
        "conv_bias": conv.bias,
        "use_sandwich_norm": model.norms == "around",
        "use_attention_gate": model.attention_gate,
        "attention_bias": model.qkv_bias,
        **NO_TOKENS,
    }


_WITHIN = "model.layers.{}"
LFM3 = ModelFamily(
    _read,
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
    _write,
    replace(
        LFM2.tensors,
        names={
            **LFM2.tensors.names,
            "q_gate_proj": f"{_WITHIN}.self_attn.gate_proj",
            "q_norm": f"{_WITHIN}.self_attn.q_norm",
            "k_norm": f"{_WITHIN}.self_attn.k_norm",
            "o_proj": f"{_WITHIN}.self_attn.o_proj",
            "attention_closing_norm": f"{_WITHIN}.post_operator_norm",
            "convolution_closing_norm": f"{_WITHIN}.post_operator_norm",
            "mlp_closing_norm": f"{_WITHIN}.post_ffn_norm",
        },
        renamed={"self_attn.gate_proj": "self_attn.g_proj"},
    ),
    {
        **LFM2.keys,
        "ffn": ("intermediate_size",),
        "tied_embeddings": ("tie_word_embeddings",),
        "mixer_pattern": ("layer_types",),
        "attention_pattern": ("layer_types",),
        "norms": ("use_sandwich_norm",),
        "attention_gate": ("use_attention_gate",),
    },
)
