"""A.X-K1: a DeepSeek-V3 with a norm of what experts and the shared one give together.

Published files have such a norm of the dense block, too, which is not used, and no bias of routers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.glm_flash import GLM4_MOE_LITE
from bigplan.spec.hf.reader import ConfigReader

_AXK1 = GLM4_MOE_LITE.like(
    "axk1",
    "AXK1ForCausalLM",
    {
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
    tensors=GLM4_MOE_LITE.tensors.but(
        {"mlp_closing_norm": "model.layers.{}.post_mlp_layernorm"}, absent=(ROUTER_BIAS,)
    ),
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    fields = _AXK1.read(reader)
    if fields["latent_attention"]["query_rank"] is None:
        reader.refuse("q_lora_rank", "a number: queries are made of a latent")
    return fields | ({"expert_norms": "after"} if "experts" in fields else {})


AXK1 = replace(_AXK1, read=_read)
