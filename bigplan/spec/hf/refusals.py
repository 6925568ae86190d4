"""What of a Hugging Face config.json is refused: adapters, mixtures of experts, foreign parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigplan.errors import RefusedError, quoted
from bigplan.spec.unplanned import ADAPTERS, EXPERTS

# Values with which a key says that the model does not have the thing.
_OFF: tuple[Any, ...] = (None, False, 0, 0.0, [], {})


def _shown(value: object) -> str:
    return "set" if isinstance(value, dict | list) else quoted(value)


def refuse_adapter(config: Mapping[str, Any], where: str) -> None:
    """An adapter_config.json, or a config.json that holds settings of one."""
    key = next((key for key in config if key.startswith(("peft", "lora", "qlora"))), None)
    if key is None or config[key] in _OFF:
        return
    base = config.get("base_model_name_or_path")
    named = f" ({quoted(base)})" if isinstance(base, str) else ""
    raise RefusedError(
        f"{where}: `{key}` is {_shown(config[key])}: {ADAPTERS}; give the config.json of the base "
        f"model{named}, whose parameters are then all trained"
    )


# Model types whose MLPs are mixtures of experts (besides those that end in _moe).
_EXPERT_TYPES = (
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "grok-1",
    "jamba",
    "jetmoe",
    "llama4",
    "llama4_text",
    "minimax",
    "mixtral",
    "olmoe",
    "phimoe",
)
_EXPERT_WORDS = ("expert", "moe")


def refuse_experts(config: Mapping[str, Any], where: str) -> None:
    """Mixtures of experts, by their type or by their keys."""
    model_type = str(config["model_type"])
    words = [key for key in config if any(word in key for word in _EXPERT_WORDS)]
    key = next((key for key in words if config[key] not in _OFF), None)
    if model_type in _EXPERT_TYPES or model_type.endswith("_moe"):
        key, value = "model_type", model_type
    elif key is None:
        return
    else:
        value = config[key]
    raise RefusedError(
        f"{where}: `{key}` is {_shown(value)}: {EXPERTS}; take a dense model, or write one of the "
        "size that a token passes through as a model YAML"
    )


_GEMMA = (
    "its norms add one to their weights, its embeddings are scaled, and its MLP gates with gelu"
)
# Dense decoders that people train, and what their blocks have that no block here has.
_OTHER_BLOCKS = {
    "gemma": _GEMMA,
    "gemma2": f"{_GEMMA}; scores and logits are capped, norms stand before and after, and windows "
    "alternate",
    "gemma3": f"{_GEMMA}; norms stand before and after, and windows and rope's base alternate",
    "gemma3_text": f"{_GEMMA}; norms stand before and after, and windows and rope's base alternate",
    "phi": "attention and MLP read one norm together",
    "gptj": "attention and MLP read one norm together",
    "cohere": "attention and MLP read one norm together, and logits are scaled",
    "cohere2": "attention and MLP read one norm together, and windows alternate",
    "olmo2": "its norms stand after attention and MLP",
    "granite": "residuals, scores and logits are scaled",
}


def refuse_type(model_type: str, where: str) -> None:
    """A model type that is known, and not supported because of one thing."""
    if model_type in _OTHER_BLOCKS:
        raise RefusedError(
            f"{where}: model_type {model_type!r} is not supported: {_OTHER_BLOCKS[model_type]}; "
            "take a model of another family"
        )


# Keys that change the architecture beyond ModelSpec, unless they hold one of these "off" values.
_FOREIGN_WORDS = ("lora", "mamba", "ssm", "vision", "audio", "quantization")
_FOREIGN_KEYS = (
    "add_cross_attention",
    "is_encoder_decoder",
    "scale_attn_by_inverse_layer_idx",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "cross_layer_sharing",
    "num_kv_shared_layers",
)


def refuse_foreign(config: Mapping[str, Any], where: str) -> None:
    """Anything else that is no dense decoder-only transformer."""
    for key, value in config.items():
        foreign = key in _FOREIGN_KEYS or any(word in key for word in _FOREIGN_WORDS)
        if foreign and value not in _OFF:
            raise RefusedError(
                f"{where}: `{key}` is {_shown(value)}: this changes the architecture in a way that "
                "is not supported; supported: dense decoder-only transformers"
            )
