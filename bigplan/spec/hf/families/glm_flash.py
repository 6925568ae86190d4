"""GLM-4.7-Flash: GLM-4.5's experts behind DeepSeek's latent attention."""

from __future__ import annotations

from bigplan.spec.hf.families.deepseek import DEEPSEEK_V3, LATENT, experts_but
from bigplan.spec.hf.families.dense_blocks import FIRST, by_frequency, by_types, write_types
from bigplan.spec.hf.families.parts import Part

_TYPES = "mlp_layer_types"
# Files say of each block whether it has experts, or as DeepSeek's how many first ones have not.
GLM4_MOE_LITE = LATENT.like(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
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
        FIRST: 1,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        _TYPES: None,
    },
    experts_but(lambda reader: by_types(reader, by_frequency(reader))),
    Part(
        write=lambda model: {_TYPES: write_types(model)},
        keys={"dense_blocks": (_TYPES, FIRST), "expert_pattern": (_TYPES, "moe_layer_freq")},
    ),
)
