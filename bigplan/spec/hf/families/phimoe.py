"""PhiMoE (Phi-3.5-MoE): layer norms, biases of attention and the head, SparseMixer's routers.

Its evaluation is what is trained: in training, transformers draws a token's experts by chance and
multiplies what blocks read by noise (`input_jitter_noise`), which is left out here as dropout is.
Longer sequences than the pre-training's take `long_factor`, as the published code does;
transformers takes `short_factor` for all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.experts import LOCAL_EXPERTS, ROUTER, routed_tensors
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, WINDOW
from bigplan.spec.hf.families.parts import Part, always, flags, written
from bigplan.spec.hf.families.rope import PLACES
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_MSCALES = ("short_mscale", "long_mscale")  # what cos and sin are multiplied by


def _read_routing(reader: ConfigReader) -> dict[str, Any]:
    if reader.count("num_experts_per_tok") != 2:
        reader.refuse("num_experts_per_tok", "2: its routers choose two experts")
    return {"routing": {"scores": "sparsemixer", "jitter": reader.get("router_jitter_noise")}}


def _write_routing(model: ModelSpec) -> dict[str, Any]:
    return {"router_jitter_noise": model.routed_by.jitter}


_PHIMOE = LLAMA_LIKE.like(
    "phimoe",
    "PhimoeForCausalLM",
    {
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
    Part(_read_routing, _write_routing, {"routing.jitter": ("router_jitter_noise",)}),
    ROUTER,
    ATTENTION_BIAS,
    LOCAL_EXPERTS,
    WINDOW,
    flags(head_bias="lm_head_bias"),
    always(norm="layernorm", router_normalised=False),
    written({"input_jitter_noise": 0.0}),
    tensors=routed_tensors("block_sparse_moe", ("w1", "w3", "w2"), dense=False),
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    return _PHIMOE.read(_with_factor(reader))


def _with_factor(reader: ConfigReader) -> ConfigReader:
    """With the factor of cos and sin by the key that other files have for it."""
    key = next((place for place in PLACES if reader.config.get(place)), PLACES[0])
    rope = dict(reader.mapping(key))
    short, long = (rope.pop(name, None) for name in _MSCALES)
    if short is None and long is None:
        return reader
    if short != long:
        reader.refuse(key, "short_mscale and long_mscale that are equal")
    return reader.saying({key: rope | {"attention_factor": short}})


def _write(model: ModelSpec) -> dict[str, Any]:
    config = _PHIMOE.write(model)
    if (scaling := model.rope_scaling) is not None:
        own = {
            key: value for key, value in config["rope_scaling"].items() if "attention" not in key
        }
        config["rope_scaling"] = own | dict.fromkeys(_MSCALES, scaling.angle_factor)
    return config


PHIMOE = replace(_PHIMOE, read=_read, write=_write)
