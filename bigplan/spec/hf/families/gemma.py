"""Gemma, Gemma 2 and the text part of Gemma 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.families.layer_types import (
    read_layer_types,
    read_ropes,
    write_layer_types,
    write_ropes,
)
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

# All of these name the tanh approximation here: transformers takes it for the first, too.
_ACTIVATIONS = dict.fromkeys(("gelu", "gelu_pytorch_tanh", "gelu_new"), "geglu")
_AROUND = {
    "attention_closing_norm": "model.layers.{}.post_attention_layernorm",
    "post_norm": "model.layers.{}.pre_feedforward_layernorm",
    "mlp_closing_norm": "model.layers.{}.post_feedforward_layernorm",
}
_KEYS = LLAMA_KEYS | {
    "score_scale": ("query_pre_attn_scalar",),
    "score_cap": ("attn_logit_softcapping",),
    "logit_cap": ("final_logit_softcapping",),
    "local_rope_theta": ("rope_local_base_freq",),
    "attention_pattern": ("layer_types", "sliding_window_pattern"),
}
_DEFAULTS = LLAMA_DEFAULTS | {
    "head_dim": 256,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "use_bidirectional_attention": None,
}
_SECOND = _DEFAULTS | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_THIRD = _SECOND | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


def read_geglu(reader: ConfigReader) -> dict[str, Any]:
    """What all have: `hidden_activation` is the name that counts where a file has both."""
    newer = reader.config.get("hidden_activation")
    named = replace(reader, config={**reader.config, "hidden_act": newer}) if newer else reader
    return read_llama_like(named, _ACTIVATIONS) | {
        "embedding_scale": reader.count("hidden_size") ** 0.5,
        **read_attention_bias(reader),
    }


def _read_gemma(reader: ConfigReader) -> dict[str, Any]:
    if reader.flag("use_bidirectional_attention"):
        reader.refuse("use_bidirectional_attention", "false: tokens see those before them")
    return read_geglu(reader) | {"norm_plus_one": True}


def _read_capped(reader: ConfigReader, pattern: int) -> dict[str, Any]:
    """What Gemma 2 and 3 add; every `pattern`-th block sees all tokens, where none are listed."""
    blocks = range(1, reader.count("num_hidden_layers") + 1)
    return (
        _read_gemma(reader)
        | read_layer_types(reader, [number % pattern > 0 for number in blocks])
        | {
            "norms": "around",
            "score_scale": reader.count("query_pre_attn_scalar") ** -0.5,
            "score_cap": reader.get("attn_logit_softcapping"),
            "logit_cap": reader.get("final_logit_softcapping"),
        }
    )


def _read_second(reader: ConfigReader) -> dict[str, Any]:
    return _read_capped(reader, 2)


def _read_third(reader: ConfigReader) -> dict[str, Any]:
    """Rope has a base for each kind of attention, in one key or in two."""
    if reader.get("attn_logit_softcapping") is not None:
        reader.refuse("attn_logit_softcapping", "null: transformers' Gemma 3 caps no scores")
    fields = _read_capped(reader, reader.count("sliding_window_pattern"))
    fields["qk_norm"] = True
    return read_ropes(reader, fields, reader.get("rope_local_base_freq"))


def write_gemma(model: ModelSpec, model_type: str, architecture: str) -> dict[str, Any]:
    """Keys that all of their config.json files have."""
    config = write_llama_like(model, model_type, architecture)
    return config | {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": model.qkv_bias,
        **NO_TOKENS,
    }


def _write_first(model: ModelSpec) -> dict[str, Any]:
    return write_gemma(model, "gemma", "GemmaForCausalLM")


def _write_capped(model: ModelSpec, model_type: str, architecture: str) -> dict[str, Any]:
    return write_gemma(model, model_type, architecture) | {
        "query_pre_attn_scalar": round(model.scale_of_scores**-2),
        "sliding_window": model.sliding_window,
        "layer_types": write_layer_types(model),
        "attn_logit_softcapping": model.score_cap,
        "final_logit_softcapping": model.logit_cap,
    }


def _write_second(model: ModelSpec) -> dict[str, Any]:
    return _write_capped(model, "gemma2", "Gemma2ForCausalLM")


def _write_third(model: ModelSpec) -> dict[str, Any]:
    return write_ropes(_write_capped(model, "gemma3_text", "Gemma3ForCausalLM"), model)


AROUND_TENSORS: Tensors = replace(LLAMA_TENSORS, names={**LLAMA_TENSORS.names, **_AROUND})
GEMMA = ModelFamily(
    _read_gemma,
    _DEFAULTS
    | {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    _write_first,
    LLAMA_TENSORS,
    LLAMA_KEYS,
)
GEMMA2 = ModelFamily(_read_second, _SECOND, _write_second, AROUND_TENSORS, _KEYS)
GEMMA3 = ModelFamily(_read_third, _THIRD, _write_third, AROUND_TENSORS, _KEYS)
