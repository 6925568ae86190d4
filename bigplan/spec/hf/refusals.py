"""What of a Hugging Face config.json is refused: adapters, foreign experts, foreign parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from bigplan.errors import RefusedError, quoted
from bigplan.spec.unplanned import ADAPTERS

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


# Model types with mixtures of experts, and what their blocks have that no block here has.
_INDEX = "its attention sees those tokens alone that an index of its own picks"
_OTHER_EXPERTS = {
    "axk2": _INDEX,
    "bailing_hybrid": "its delta rule has a decay for each column of a key",
    "beam": "what blocks add, and the residual stream, are scaled by how deep they stand",
    "cohere2_moe": "attention and experts read the same input, side by side",
    "doge": "its experts are rows of tables, and a mask that is trained hides tokens",
    "dots3_note_text": _INDEX,
    "hy_v4": _INDEX,
    "inkling_text": "attention knows positions by trained profiles, behind short convolutions",
    "inkling2_text": "attention knows positions by trained profiles, behind short convolutions",
    "inkling2_loop_text": "some of its blocks run several times",
    "laguna": "heads differ from block to block, and a softplus of each head gates attention",
    "minimax_m3_vl_text": _INDEX,
    "qwen4_exp_text": "residual streams are several, and blocks have tables of words of their own",
    "zaya": "its routers are MLPs that hand states to the next block's",
    "dbrx": "queries, keys and values are clipped, and its norms are layer norms without biases",
    "deepseek_v32": _INDEX,
    "grok-1": "its norms stand before and after, and scores and logits are capped",
    "jamba": "most of its blocks are state-space models",
    "jetmoe": "its attention is a mixture of experts, too",
    "glm_moe_dsa": _INDEX,
    "deepseek_v4": "its attention sees compressed tokens, and residual streams are several",
    "longcat_flash": "its blocks have two attentions beside experts, some of which do nothing",
    "kimi_linear": "its delta rule has a decay for each column of a key",
    "mimo_v2_flash": "its values are narrower than keys, and heads differ from block to block",
    "minimax": "most of its attention is linear",
}
# Keys of experts by other names, and the loss's, which say nothing of the model.
_READ = ("num_experts", "num_local_experts", "output_router_logits", "router_jitter_noise")
_EXPERT_WORDS = ("expert", "moe", "router")
_USUAL = (("moe_layer_freq", 1),)  # experts in all blocks but first ones
_DENSE_BLOCKS = ("first_k_dense_replace", "n_dense_layers", "interleave_moe_layer_step")


def refuse_experts(
    config: Mapping[str, Any], where: str, families: Mapping[str, Collection[str]]
) -> None:
    """Experts of other kinds, by their type or by their keys; `families` read some keys each."""
    model_type = str(config["model_type"])
    if model_type in _OTHER_EXPERTS:
        raise RefusedError(
            f"{where}: model_type {model_type!r} is not supported: {_OTHER_EXPERTS[model_type]}; "
            f"take a model of {', '.join(families)}, or a dense one"
        )
    routed = model_type in families
    read = (*_READ, *families[model_type]) if routed else ()
    for key, value in config.items():
        about = key in _DENSE_BLOCKS or any(word in key for word in _EXPERT_WORDS)
        if not about or key in read or value in _OFF or (key, value) in _USUAL:
            continue
        told = (
            f"models of type {model_type} are planned without it; leave it out, or take another "
            "model"
            if routed
            else f"experts are read in config.json files of {', '.join(families)}; take one of "
            "these, or write a model of this shape as a model YAML with `experts`"
        )
        raise RefusedError(f"{where}: `{key}` is {_shown(value)}: {told}")


# Other models that people train, and what they have that no model here has.
_FIRST_MAMBA = "its state space is Mamba's first, with a decay for each channel and state"
_OF_GEMMA3N = "residual streams are several, and blocks have tables of words of their own"
_WAVES = "its positions are fixed waves that are added to words"
_SHARED = "some of its blocks have one attention between them, with adapters of each"
_LAYER_NORMS = "queries and keys have layer norms with biases"
_ENCODER = "it is an encoder, and bigplan plans decoders, which predict the next token"
_PAIR = "its decoder reads what an encoder gives; bigplan plans decoders alone"
_OTHER_BLOCKS = {
    **dict.fromkeys(
        ("albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta"), _ENCODER
    ),
    **dict.fromkeys(("xlm-roberta", "clip", "siglip", "vit", "wav2vec2"), _ENCODER),
    **dict.fromkeys(("bart", "marian", "mbart", "mt5", "t5", "t5gemma", "whisper"), _PAIR),
    "biogpt": "words are scaled, but not the learned positions that are added to them",
    "bitnet": "norms stand within attention and MLP, whose matrices are rounded to three values",
    "cpmant": "its positions are distances in buckets",
    "ctrl": _WAVES,
    "diffllama": "its attention is the difference of two",
    "doge": "its attention has a trained mask, and residuals have a factor of each column",
    "dory": "norms keep hidden states on a sphere, and some of its blocks run several times",
    "falcon_mamba": _FIRST_MAMBA,
    "fuyu": _LAYER_NORMS,
    "gemma3n": _OF_GEMMA3N,
    "gemma3n_text": _OF_GEMMA3N,
    "gpt_neox_japanese": "attention's product has a bias in its last block alone",
    "hrm_text": "two stacks of blocks run several times, one within the other",
    "mamba": _FIRST_MAMBA,
    "modernbert-decoder": "a product, an activation and a norm stand before its head",
    "openai-gpt": "norms stand after sums with the residual stream",
    "persimmon": _LAYER_NORMS,
    "recurrent_gemma": "most of its blocks are gated recurrences",
    "rwkv": "its blocks are recurrences",
    "xglm": _WAVES,
    "xlstm": "its blocks are recurrences",
    "zamba": _SHARED,
    "zamba2": _SHARED,
}


def refuse_type(config: Mapping[str, Any], where: str) -> None:
    """A model type that is known, and not supported because of one thing."""
    model_type = str(config["model_type"])
    if model_type in _OTHER_BLOCKS:
        raise RefusedError(
            f"{where}: model_type {model_type!r} is not supported: {_OTHER_BLOCKS[model_type]}; "
            "take a model of another family"
        )


# Keys that change the architecture beyond ModelSpec, unless they hold one of these "off" values.
_FOREIGN_WORDS = ("lora", "mamba", "ssm", "vision", "audio")
_RANKS = ("kv_lora_rank", "q_lora_rank")  # of latent attention, no adapters
_OF_MAMBA = ("mamba_", "ssm_state_size", "use_mamba_kernels")  # how such keys begin
_FACTORS = {"falcon_h1": ("ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier")}
_WITH_MAMBA = ("granitemoehybrid", "bamba", "nemotron_h", "mamba2", "falcon_h1")
_WITH_RANKS = (
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k2",
    "glm4_moe_lite",
    "youtu",
    "axk1",
    "mistral4",
    "mistral3",
    "minicpm3",
    "sarvam_mla",
)
_OF_INFERENCE = ("mamba_ssm_dtype",)  # the dtype of states of delta rules, kept between tokens
_SHARED_KEYS = ("num_kv_shared_layers",)
_FOREIGN_KEYS = (
    "add_cross_attention",
    "is_encoder_decoder",
    "scale_attn_by_inverse_layer_idx",
    "cross_layer_sharing",
    *_SHARED_KEYS,
)


# Quantised files that are read, as what they were made of in bf16.
_READ_QUANTISED = (("gpt_oss", "mxfp4"),)


def refuse_foreign(config: Mapping[str, Any], where: str) -> None:
    """Quantised weights, and anything else that is no decoder-only transformer."""
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    if quantised not in _OFF and (config["model_type"], method) not in _READ_QUANTISED:
        raise RefusedError(
            f"{where}: `quantization_config` is set: its files hold quantised weights, which are "
            "not read; take a bf16 copy of the model, or remove the key to plan without its weights"
        )
    read = (*_OF_INFERENCE, *(_RANKS if config["model_type"] in _WITH_RANKS else ()))
    read += _FACTORS.get(config["model_type"], ())
    if str(config["model_type"]).startswith("gemma4"):
        read += _SHARED_KEYS
    mamba = config["model_type"] in _WITH_MAMBA
    for key, value in config.items():
        if key in read or (mamba and key.startswith(_OF_MAMBA)):
            continue
        foreign = key in _FOREIGN_KEYS or any(word in key for word in _FOREIGN_WORDS)
        if foreign and value not in _OFF:
            raise RefusedError(
                f"{where}: `{key}` is {_shown(value)}: this changes the architecture in a way that "
                "is not supported; supported: decoder-only transformers"
            )
