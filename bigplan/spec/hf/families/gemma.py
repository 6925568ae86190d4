"""Gemma, Gemma 2 and the text part of Gemma 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.layer_types import layer_types, ropes_by_kind
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_BUT_MLP, LLAMA_TENSORS
from bigplan.spec.hf.families.parts import Part, activation, always, off, unset, values, written
from bigplan.spec.hf.reader import ConfigReader

_TANH = "gelu_pytorch_tanh"
# All of these name the tanh approximation here: transformers takes it for the first, too.
_ACTIVATIONS = dict.fromkeys(("gelu", _TANH, "gelu_new"), "geglu")
_GEGLU = LLAMA_BUT_MLP.like(
    "gemma",
    "GemmaForCausalLM",
    {
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": _TANH,
        "use_bidirectional_attention": None,
    },
    activation("hidden_act", _ACTIVATIONS, _TANH),
    Part(lambda reader: {"embedding_scale": reader.count("hidden_size") ** 0.5}),
    ATTENTION_BIAS,
    written({"hidden_activation": _TANH, **NO_TOKENS}),
)


def _read_geglu(reader: ConfigReader) -> dict[str, Any]:
    """`hidden_activation` is the name that counts where a file has both."""
    newer = reader.config.get("hidden_activation")
    named = reader.saying({"hidden_act": newer}) if newer else reader
    return _GEGLU.read(named)


GEGLU = replace(_GEGLU, read=_read_geglu)  # what all have
GEMMA = GEGLU.like(
    "gemma",
    "GemmaForCausalLM",
    {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    off("use_bidirectional_attention", "false: tokens see those before them"),
    always(norm_plus_one=True),
)
_CAPS = values(score_cap="attn_logit_softcapping", logit_cap="final_logit_softcapping")
_SCALE = Part(
    lambda reader: {"score_scale": reader.count("query_pre_attn_scalar") ** -0.5},
    lambda model: {"query_pre_attn_scalar": round(model.scale_of_scores**-2)},
    {"score_scale": ("query_pre_attn_scalar",)},
)
AROUND_TENSORS = LLAMA_TENSORS.but(
    {
        "attention_closing_norm": "model.layers.{}.post_attention_layernorm",
        "post_norm": "model.layers.{}.pre_feedforward_layernorm",
        "mlp_closing_norm": "model.layers.{}.post_feedforward_layernorm",
    }
)
_EVERY = "sliding_window_pattern"  # of blocks sees all tokens, where a file lists none
_CAPPED = GEMMA.like(
    "gemma2",
    "Gemma2ForCausalLM",
    {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    always(norms="around"),
    _SCALE,
    _CAPS,
    tensors=AROUND_TENSORS,
)
GEMMA2 = _CAPPED.like(
    "gemma2", "Gemma2ForCausalLM", {}, layer_types(lambda reader, block: block % 2 == 0)
)
_THIRD = _CAPPED.like(
    "gemma3_text",
    "Gemma3ForCausalLM",
    {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        _EVERY: 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    unset("attn_logit_softcapping", "null: transformers' Gemma 3 caps no scores"),
    layer_types(lambda reader, block: (block + 1) % reader.count(_EVERY) > 0, _EVERY),
    always(qk_norm=True),
    Part(keys={"local_rope_theta": ("rope_local_base_freq",)}),
)


# Rope has a base for each kind of attention, in one key or in two.
GEMMA3 = ropes_by_kind(_THIRD, lambda reader: reader.get("rope_local_base_freq"))
