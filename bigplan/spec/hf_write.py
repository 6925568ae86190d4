"""ModelSpec -> Hugging Face's config.json: the inverse of hf.py, and checked to be that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bigplan.errors import InputError, RefusedError
from bigplan.spec.hf import from_hf_config
from bigplan.spec.model import ModelSpec, RopeScaling


def to_hf_config(model: ModelSpec) -> dict[str, Any]:
    """The config.json of a family that computes what `model` does, read back and compared.

    Raises RefusedError where no family does, naming what the nearest one has otherwise.
    """
    unlike: dict[str, tuple[str, ...]] = {}
    for family, write in _WRITERS.items():
        config = write(model)
        try:
            unlike[family] = differences(model, from_hf_config(config))
        except InputError:  # the family has no key for what makes the model legal, such as head_dim
            continue
        if not unlike[family]:
            return config
    family = min(unlike, key=lambda name: len(unlike[name]))
    named = ", ".join(f"{key} {getattr(model, key)}" for key in unlike[family])
    raise RefusedError(
        f"{model.name} has {named}, which Hugging Face's {family} has not, nor another of the "
        f"families that are written: {', '.join(_WRITERS)}"
    )


def differences(one: ModelSpec, other: ModelSpec) -> tuple[str, ...]:
    """The fields in which two models differ, as far as they mean something for the first."""
    ignored = {"name", "source"}
    if one.norm == "rmsnorm":
        ignored.add("norm_bias")
    if one.positions != "rope":
        ignored |= {"rope_theta", "rotary_fraction"}
    names = (name for name in ModelSpec.model_fields if name not in ignored)
    return tuple(name for name in names if getattr(one, name) != getattr(other, name))


def _llama_like(model: ModelSpec, model_type: str, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model.rope_scaling),
        "tie_word_embeddings": model.tied_embeddings,
        "attention_dropout": 0.0,
    }


def _rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields = {
        "rope_type": scaling.name,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_length,
    }
    return {key: value for key, value in fields.items() if value is not None}


def _llama(model: ModelSpec) -> dict[str, Any]:
    return _llama_like(model, "llama", "LlamaForCausalLM") | {
        "attention_bias": model.qkv_bias,
        "mlp_bias": model.mlp_bias,
    }


def _mistral(model: ModelSpec) -> dict[str, Any]:
    config = _llama_like(model, "mistral", "MistralForCausalLM")
    return config | {"sliding_window": model.sliding_window}


def _window(model: ModelSpec) -> dict[str, Any]:
    slides = model.sliding_window is not None
    return {
        "use_sliding_window": slides,
        "sliding_window": model.sliding_window,
        "max_window_layers": 0 if slides else model.layers,
    }


def _qwen2(model: ModelSpec) -> dict[str, Any]:
    return _llama_like(model, "qwen2", "Qwen2ForCausalLM") | _window(model)


def _qwen3(model: ModelSpec) -> dict[str, Any]:
    config = _llama_like(model, "qwen3", "Qwen3ForCausalLM") | _window(model)
    return config | {"attention_bias": model.qkv_bias}


def _gpt2(model: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu" if model.mlp == "gelu" else "gelu_new",
        "n_embd": model.hidden,
        "n_inner": model.ffn,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.max_sequence_length,
        "vocab_size": model.vocab,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        # transformers' default would be a token that a small vocabulary lacks
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _opt(model: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}.get(model.mlp, "relu"),
        "hidden_size": model.hidden,
        "word_embed_proj_dim": model.hidden,
        "ffn_dim": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.max_sequence_length,
        "vocab_size": model.vocab,
        "do_layer_norm_before": True,
        "enable_bias": model.mlp_bias,
        "tie_word_embeddings": model.tied_embeddings,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


_WRITERS: dict[str, Callable[[ModelSpec], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "opt": _opt,
}
