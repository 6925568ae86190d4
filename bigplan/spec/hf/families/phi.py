"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel after one norm, a bias of the head."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.families.llama import LLAMA_KEYS, read_llama_like, write_llama_like
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_TENSORS = Tensors(
    {
        "embed_tokens": "model.embed_tokens",
        "input_norm": "model.layers.{}.input_layernorm",
        "q_proj": "model.layers.{}.self_attn.q_proj",
        "k_proj": "model.layers.{}.self_attn.k_proj",
        "v_proj": "model.layers.{}.self_attn.v_proj",
        "o_proj": "model.layers.{}.self_attn.dense",
        "up_proj": "model.layers.{}.mlp.fc1",
        "down_proj": "model.layers.{}.mlp.fc2",
        "norm": "model.final_layernorm",
        "lm_head": "lm_head",
    }
)
_DEFAULTS = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,  # which its files do not have
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "qk_layernorm": False,
    "tie_word_embeddings": False,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.flag("qk_layernorm"):
        reader.refuse("qk_layernorm", "false: it is a layer norm with biases")
    if reader.flag("tie_word_embeddings"):
        reader.refuse("tie_word_embeddings", "false: the head has a bias")
    return read_llama_like(reader, GELUS) | {
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_eps"),
        "parallel_residual": True,
        "shared_norm": True,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "phi", "PhiForCausalLM")
    del config["rms_norm_eps"]
    return config | {
        "hidden_act": "gelu" if model.mlp == "gelu" else "gelu_new",
        "layer_norm_eps": model.norm_epsilon,
        "partial_rotary_factor": model.rotary_fraction,
        "resid_pdrop": 0.0,
        **NO_TOKENS,
    }


PHI = ModelFamily(
    _read, _DEFAULTS, _write, _TENSORS, LLAMA_KEYS | {"norm_epsilon": ("layer_norm_eps",)}
)
