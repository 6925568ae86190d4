"""GLM-4.7-Flash: GLM-4.5's experts behind DeepSeek's latent attention."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.deepseek import DEEPSEEK_V3, read_deepseek, write_deepseek
from bigplan.spec.hf.families.dense_blocks import by_frequency, by_types, write_types
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Files say of each block whether it has experts, or as DeepSeek's how many first ones not."""
    return read_deepseek(reader, by_types(reader, by_frequency(reader)))


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_deepseek(model, "glm4_moe_lite", "Glm4MoeLiteForCausalLM") | {
        "mlp_layer_types": write_types(model)
    }


GLM4_MOE_LITE = ModelFamily(
    _read,
    {
        **DEEPSEEK_V3.defaults,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "mlp_layer_types": None,
    },
    _write,
    DEEPSEEK_V3.tensors,
    {
        **DEEPSEEK_V3.keys,
        "dense_blocks": ("mlp_layer_types", "first_k_dense_replace"),
        "expert_pattern": ("mlp_layer_types", "moe_layer_freq"),
    },
)
