"""Solar Open: GLM-4.5's experts in every block, behind plain attention."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.llama import LLAMA_DEFAULTS, read_llama_like, write_llama_like
from bigplan.spec.hf.families.shared_experts import (
    GLM4_MOE,
    read_deepseek_experts,
    write_deepseek_experts,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Of its first blocks' width, which files still tell, transformers' class makes nothing."""
    if reader.count("first_k_dense_replace", least=0):
        reader.refuse("first_k_dense_replace", "0: experts in all blocks")
    if reader.flag("use_qk_norm"):
        reader.refuse("use_qk_norm", "false")
    fields = read_llama_like(reader) | read_deepseek_experts(reader)
    if fields["rotary_fraction"] != 1:
        reader.refuse("partial_rotary_factor", "1: rope turns all columns")
    return fields | {"qkv_bias": reader.flag("attention_bias")}


def _write(model: ModelSpec) -> dict[str, Any]:
    return (
        write_llama_like(model, "solar_open", "SolarOpenForCausalLM")
        | write_deepseek_experts(model)
        | {
            "attention_bias": model.qkv_bias,
            # transformers' defaults would be tokens that a small vocabulary lacks
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
    )


SOLAR_OPEN = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | {
        "vocab_size": 196608,
        "hidden_size": 4096,
        "intermediate_size": 1280,
        "moe_intermediate_size": 1280,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "use_qk_norm": False,
    },
    _write,
    GLM4_MOE.tensors,
    GLM4_MOE.keys,
)
