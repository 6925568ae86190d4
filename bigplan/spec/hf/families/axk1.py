"""A.X-K1: a DeepSeek-V3 with a norm of what experts and the shared one give together.

Published files have such a norm of the dense block, too, which is not used, and no bias of routers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.deepseek import write_deepseek
from bigplan.spec.hf.families.dense_blocks import write_types
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.glm_flash import GLM4_MOE_LITE, read_flash
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import ROUTER_BIAS
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    fields = read_flash(reader)
    if fields["latent_attention"]["query_rank"] is None:
        reader.refuse("q_lora_rank", "a number: queries are made of a latent")
    return fields | ({"expert_norms": "after"} if "experts" in fields else {})


def _write(model: ModelSpec) -> dict[str, Any]:
    return write_deepseek(model, "axk1", "AXK1ForCausalLM") | {
        "mlp_layer_types": write_types(model)
    }


_TENSORS = GLM4_MOE_LITE.tensors
AXK1 = ModelFamily(
    _read,
    {
        **GLM4_MOE_LITE.defaults,
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 192,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
    _write,
    replace(
        _TENSORS,
        names={**_TENSORS.names, "mlp_closing_norm": "model.layers.{}.post_mlp_layernorm"},
        absent=(ROUTER_BIAS,),
    ),
    GLM4_MOE_LITE.keys,
)
