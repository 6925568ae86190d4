"""Hugging Face's config.json -> ModelSpec, for the architectures that are supported by name.

Defaults are those of transformers' own config classes, for keys that a config.json leaves out.
Keys that change the architecture in a way that ModelSpec cannot say are refused, by name.
Dropout and token ids are ignored; rope scaling too, because it changes no shape and no cost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigplan.errors import InputError, RefusedError
from bigplan.spec.document import read_text, validate
from bigplan.spec.model import ModelSpec
from bigplan.spec.problems import did_you_mean

_REQUIRED = object()

Config = Mapping[str, Any]


@dataclass(frozen=True)
class _Reader:
    """Looks keys up in a config, with the class's defaults and the file's name for messages."""

    config: Config
    defaults: Mapping[str, Any]
    where: str

    def get(self, key: str) -> Any:
        """The key's value, or its default; InputError where neither exists."""
        value = self.config.get(key, self.defaults.get(key, _REQUIRED))
        if value is _REQUIRED:
            raise InputError(
                f"{self.where}: missing key {key!r}, which model_type "
                f"{self.config['model_type']!r} needs; add it, or take the model's own config.json"
            )
        return value

    def count(self, key: str) -> int:
        """The key's value, which must be a whole number."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"{self.where}: `{key}` is {value!r}, which must be a whole number of at least 1"
            )
        return value

    def optional_count(self, key: str) -> int | None:
        """As `count`, or None where the key is null or absent."""
        missing = self.config.get(key, self.defaults.get(key)) is None
        return None if missing else self.count(key)

    def refuse(self, key: str, supported: str) -> None:
        """Stop: `key` has a value that cannot be represented."""
        raise RefusedError(
            f"{self.where}: `{key}` is {self.get(key)!r}, which is not supported "
            f"for model_type {self.config['model_type']!r}; supported: {supported}"
        )


def load_hf_config(path: Path) -> ModelSpec:
    """Read a config.json. Raises InputError, and RefusedError for what is not supported."""
    try:
        config = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}; correct it") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: holds no JSON object; expected a Hugging Face config.json")
    return from_hf_config(config, str(path))


def from_hf_config(config: Config, where: str = "config.json") -> ModelSpec:
    """ModelSpec of a config's plain data. Raises InputError and RefusedError."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(
            f"{where}: missing key 'model_type'; expected a Hugging Face config.json "
            f"with one of {', '.join(_READERS)}"
        )
    if model_type not in _READERS:
        raise RefusedError(
            f"{where}: model_type {model_type!r} is not supported"
            f"{did_you_mean(model_type, _READERS)} (supported: {', '.join(_READERS)}); "
            "a model of the same shape can be written as a model YAML"
        )
    _refuse_foreign(config, where)
    read, defaults = _READERS[model_type]
    fields = read(_Reader(config, defaults, where))
    name = str(config.get("_name_or_path") or config.get("name") or Path(where).parent.name)
    fields |= {"name": name or model_type, "source": f"Hugging Face config.json ({model_type})"}
    return validate(fields, ModelSpec, where)


# Keys that change the architecture beyond ModelSpec, unless they hold one of these "off" values.
_FOREIGN_WORDS = ("expert", "moe", "lora", "mamba", "ssm", "vision", "audio", "quantization")
_FOREIGN_KEYS = (
    "add_cross_attention",
    "is_encoder_decoder",
    "use_parallel_residual",
    "scale_attn_by_inverse_layer_idx",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "cross_layer_sharing",
    "num_kv_shared_layers",
)
_OFF: tuple[Any, ...] = (None, False, 0, 0.0, [], {})


def _refuse_foreign(config: Config, where: str) -> None:
    for key, value in config.items():
        foreign = key in _FOREIGN_KEYS or any(word in key for word in _FOREIGN_WORDS)
        if foreign and value not in _OFF:
            shown = "set" if isinstance(value, dict | list) else repr(value)
            raise RefusedError(
                f"{where}: `{key}` is {shown}: this changes the architecture in a way that is "
                "not supported; supported: dense decoder-only transformers"
            )
    if config.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise RefusedError(
            f"{where}: `partial_rotary_factor` is {config['partial_rotary_factor']!r}, "
            "which is not supported; supported: 1.0"
        )


def _llama_like(reader: _Reader) -> dict[str, Any]:
    """Fields that llama, mistral, qwen2 and qwen3 share."""
    if reader.get("hidden_act") not in ("silu", "swish"):
        reader.refuse("hidden_act", "silu")
    rope = reader.config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", reader.get("rope_theta"))
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
        "rope_theta": theta,
        "tied_embeddings": bool(reader.get("tie_word_embeddings")),
    }


def _llama(reader: _Reader) -> dict[str, Any]:
    bias = bool(reader.get("attention_bias"))
    return _llama_like(reader) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bool(reader.get("mlp_bias")),
    }


def _mistral(reader: _Reader) -> dict[str, Any]:
    return _llama_like(reader) | {"sliding_window": reader.optional_count("sliding_window")}


def _qwen_window(reader: _Reader) -> int | None:
    """Qwen slides in layers from max_window_layers on; ModelSpec can say only all or none."""
    kinds = set(reader.config.get("layer_types") or ())
    if len(kinds) > 1:
        reader.refuse("layer_types", "the same kind of attention in every layer")
    if kinds:
        slides = kinds == {"sliding_attention"}
    else:
        slides = bool(reader.get("use_sliding_window"))
        first = reader.get("max_window_layers")
        if slides and first >= reader.count("num_hidden_layers"):
            slides = False
        elif slides and first > 0:
            reader.refuse("max_window_layers", "0, or use_sliding_window false")
    return reader.optional_count("sliding_window") if slides else None


def _qwen2(reader: _Reader) -> dict[str, Any]:
    return _llama_like(reader) | {"qkv_bias": True, "sliding_window": _qwen_window(reader)}


def _qwen3(reader: _Reader) -> dict[str, Any]:
    bias = bool(reader.get("attention_bias"))
    return _llama_like(reader) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": True,
        "sliding_window": _qwen_window(reader),
    }


def _gpt2(reader: _Reader) -> dict[str, Any]:
    if reader.get("activation_function") not in ("gelu_new", "gelu", "gelu_pytorch_tanh"):
        reader.refuse("activation_function", "gelu_new, gelu, gelu_pytorch_tanh")
    if not reader.get("scale_attn_weights"):
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
        "mlp": "gelu",
        "positions": "learned",
        "tied_embeddings": bool(reader.get("tie_word_embeddings")),
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    }


_LLAMA_DEFAULTS: dict[str, Any] = {
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

_READERS: dict[str, tuple[Callable[[_Reader], dict[str, Any]], dict[str, Any]]] = {
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
}

SUPPORTED_MODEL_TYPES: tuple[str, ...] = tuple(_READERS)
