"""PhiMoE (Phi-3.5-MoE): layer norms, biases of attention and the head, SparseMixer's routers.

Its evaluation is what is trained: in training, transformers draws a token's experts by chance and
multiplies what blocks read by noise (`input_jitter_noise`), which is left out here as dropout is.
Longer sequences than the pre-training's take `long_factor`, as the published code does;
transformers takes `short_factor` for all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.experts import ROUTER_KEYS, read_router, routed_tensors, write_router
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.families.rope import PLACES
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_MSCALES = ("short_mscale", "long_mscale")  # what cos and sin are multiplied by


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.count("num_experts_per_tok") != 2:
        reader.refuse("num_experts_per_tok", "2: its routers choose two experts")
    return (
        read_llama_like(_with_factor(reader))
        | read_router(reader)
        | read_attention_bias(reader)
        | {
            "norm": "layernorm",
            "head_bias": reader.flag("lm_head_bias"),
            "experts": reader.count("num_local_experts"),
            "router_normalised": False,
            "routing": {"scores": "sparsemixer", "jitter": reader.get("router_jitter_noise")},
            "sliding_window": reader.optional_count("sliding_window"),
        }
    )


def _with_factor(reader: ConfigReader) -> ConfigReader:
    """With the factor of cos and sin by the key that other files have for it."""
    key = next((place for place in PLACES if reader.config.get(place)), PLACES[0])
    rope = dict(reader.mapping(key))
    short, long = (rope.pop(name, None) for name in _MSCALES)
    if short is None and long is None:
        return reader
    if short != long:
        reader.refuse(key, "short_mscale and long_mscale that are equal")
    return replace(reader, config={**reader.config, key: rope | {"attention_factor": short}})


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "phimoe", "PhimoeForCausalLM") | write_router(model)
    if (scaling := model.rope_scaling) is not None:
        own = {
            key: value for key, value in config["rope_scaling"].items() if "attention" not in key
        }
        config["rope_scaling"] = own | dict.fromkeys(_MSCALES, scaling.angle_factor)
    return config | {
        "num_local_experts": model.experts,
        "router_jitter_noise": model.routed_by.jitter,
        "input_jitter_noise": 0.0,
        "attention_bias": model.qkv_bias,
        "lm_head_bias": model.head_bias,
        "sliding_window": model.sliding_window,
    }


PHIMOE = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | {
        "vocab_size": 32064,
        "hidden_size": 4096,
        "intermediate_size": 6400,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 16,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.01,
        "lm_head_bias": False,
    },
    _write,
    routed_tensors("block_sparse_moe", ("w1", "w3", "w2"), dense=False),
    ROUTER_KEYS
    | {
        "experts": ("num_local_experts",),
        "qkv_bias": ("attention_bias",),
        "attention_output_bias": ("attention_bias",),
        "head_bias": ("lm_head_bias",),
        "routing.jitter": ("router_jitter_noise",),
    },
)
