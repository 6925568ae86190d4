"""The supported families of Hugging Face models: which keys of a config.json say what.

Defaults are those of transformers' own config classes, for keys that a config.json leaves out.
GPT-NeoX's fused query_key_value is read as three matrices of the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bigplan.spec.hf_reader import Reader

# transformers' names; the tanh approximation goes by three
_GELUS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


_SCALINGS = (None, "default", "linear", "llama3", "dynamic", "yarn", "longrope")


def _rope(reader: Reader) -> dict[str, Any]:
    """Base of the rotary angles, how they are scaled, and the part of a head that is rotated."""
    key = "rope_parameters" if reader.mapping("rope_parameters") else "rope_scaling"
    rope = reader.mapping(key)
    if rope.get("rope_type", rope.get("type")) not in _SCALINGS:
        reader.refuse(key, f"rope_type {', '.join(s for s in _SCALINGS if s)}")
    part = rope.get("partial_rotary_factor", reader.get("partial_rotary_factor"))
    return {
        "rope_theta": rope.get("rope_theta", reader.get("rope_theta")),
        "rope_scaling": _rope_scaling(rope, reader),
        "rotary_fraction": 1.0 if part is None else part,
    }


def _rope_scaling(rope: Mapping[str, Any], reader: Reader) -> dict[str, Any] | None:
    """The fields of ModelSpec.rope_scaling, "type" and "rope_type" being old and new names."""
    name = rope.get("rope_type", rope.get("type"))
    if name in (None, "default"):
        return None
    length = rope.get("original_max_position_embeddings")
    if length is None and name == "llama3":
        length = reader.count("max_position_embeddings")
    fields = {
        "name": name,
        "factor": rope.get("factor"),
        "low_frequency_factor": rope.get("low_freq_factor"),
        "high_frequency_factor": rope.get("high_freq_factor"),
        "original_length": length,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _llama_like(reader: Reader) -> dict[str, Any]:
    """Fields that llama, mistral, qwen2 and qwen3 share."""
    if reader.text("hidden_act") not in ("silu", "swish"):
        reader.refuse("hidden_act", "silu")
    heads, hidden = reader.count("num_attention_heads"), reader.count("hidden_size")
    return {
        "layers": reader.count("num_hidden_layers"),
        "hidden": hidden,
        "ffn": reader.count("intermediate_size"),
        "heads": heads,
        "kv_heads": reader.optional_count("num_key_value_heads") or heads,
        "head_dim": reader.optional_count("head_dim") or hidden // heads,
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("max_position_embeddings"),
        "norm": "rmsnorm",
        "norm_epsilon": reader.get("rms_norm_eps"),
        "mlp": "swiglu",
        "positions": "rope",
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        **_rope(reader),
    }


def _llama(reader: Reader) -> dict[str, Any]:
    bias = reader.flag("attention_bias")
    return _llama_like(reader) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": reader.flag("mlp_bias"),
    }


def _mistral(reader: Reader) -> dict[str, Any]:
    return _llama_like(reader) | {"sliding_window": reader.optional_count("sliding_window")}


def _qwen_window(reader: Reader) -> int | None:
    """Qwen slides in layers from max_window_layers on; ModelSpec can say only all or none."""
    kinds = set(reader.texts("layer_types"))
    if len(kinds) > 1:
        reader.refuse("layer_types", "the same kind of attention in every layer")
    if kinds:
        slides = kinds == {"sliding_attention"}
    else:
        slides = reader.flag("use_sliding_window")
        first = reader.count("max_window_layers", least=0)
        if slides and first >= reader.count("num_hidden_layers"):
            slides = False
        elif slides and first > 0:
            reader.refuse("max_window_layers", "0, or use_sliding_window false")
    return reader.optional_count("sliding_window") if slides else None


def _qwen2(reader: Reader) -> dict[str, Any]:
    return _llama_like(reader) | {"qkv_bias": True, "sliding_window": _qwen_window(reader)}


def _qwen3(reader: Reader) -> dict[str, Any]:
    bias = reader.flag("attention_bias")
    return _llama_like(reader) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": True,
        "sliding_window": _qwen_window(reader),
    }


def _gpt2(reader: Reader) -> dict[str, Any]:
    if reader.text("activation_function") not in _GELUS:
        reader.refuse("activation_function", ", ".join(_GELUS))
    if not reader.flag("scale_attn_weights"):
        reader.refuse("scale_attn_weights", "true")
    hidden = reader.count("n_embd")
    return {
        "layers": reader.count("n_layer"),
        "hidden": hidden,
        "ffn": reader.optional_count("n_inner") or 4 * hidden,
        "heads": reader.count("n_head"),
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("n_positions"),
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_epsilon"),
        "mlp": _GELUS[reader.text("activation_function")],
        "positions": "learned",
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    }


def _gpt_neox(reader: Reader) -> dict[str, Any]:
    if reader.text("hidden_act") not in _GELUS:
        reader.refuse("hidden_act", ", ".join(_GELUS))
    # Files written before transformers 5 name rotary_pct and rotary_emb_base.
    old = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
    renamed = {new: reader.config[name] for new, name in old.items() if name in reader.config}
    rope = _rope(replace(reader, config={**renamed, **reader.config}))
    bias = reader.flag("attention_bias")
    return {
        "layers": reader.count("num_hidden_layers"),
        "hidden": reader.count("hidden_size"),
        "ffn": reader.count("intermediate_size"),
        "heads": reader.count("num_attention_heads"),
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("max_position_embeddings"),
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_eps"),
        "mlp": _GELUS[reader.text("hidden_act")],
        "positions": "rope",
        **rope,
        "parallel_residual": reader.flag("use_parallel_residual"),
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": True,
    }


def _opt(reader: Reader) -> dict[str, Any]:
    activation, hidden = reader.text("activation_function"), reader.count("hidden_size")
    if activation not in ("relu", *_GELUS):
        reader.refuse("activation_function", ", ".join(("relu", *_GELUS)))
    if (reader.optional_count("word_embed_proj_dim") or hidden) != hidden:
        reader.refuse("word_embed_proj_dim", f"hidden_size, which is {hidden}")
    for key, usual in _OPT_SHAPE.items():
        if reader.flag(key) is not usual:
            reader.refuse(key, str(usual).lower())
    bias = reader.flag("enable_bias")
    return {
        "layers": reader.count("num_hidden_layers"),
        "hidden": hidden,
        "ffn": reader.count("ffn_dim"),
        "heads": reader.count("num_attention_heads"),
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("max_position_embeddings"),
        "norm": "layernorm",
        "norm_epsilon": 1e-5,  # torch's; the config has no key for it
        "mlp": "relu" if activation == "relu" else _GELUS[activation],
        "positions": "learned",
        "position_offset": 2,
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
    }


# Values that the larger OPT models share; opt-350m differs.
_OPT_SHAPE = {
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
}

_LLAMA_DEFAULTS: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: dict[str, tuple[Callable[[Reader], dict[str, Any]], dict[str, Any]]] = {
    "llama": (_llama, _LLAMA_DEFAULTS | {"max_position_embeddings": 2048, "mlp_bias": False}),
    "mistral": (
        _mistral,
        _LLAMA_DEFAULTS
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "qwen2": (_qwen2, _QWEN_DEFAULTS),
    "qwen3": (_qwen3, _QWEN_DEFAULTS | {"head_dim": 128}),
    "gpt2": (
        _gpt2,
        {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_neox": (
        _gpt_neox,
        {
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "opt": (
        _opt,
        _OPT_SHAPE
        | {"activation_function": "relu", "enable_bias": True, "tie_word_embeddings": True},
    ),
}
