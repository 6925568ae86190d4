"""GLM-4: a Llama with biases, whose rope turns pairs side by side; later ones norm around."""

from __future__ import annotations

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import LLAMA_LIKE, LLAMA_TENSORS
from bigplan.spec.hf.families.parts import always, flags, written
from bigplan.spec.hf.families.rope import PARTLY_TURNED

_FUSED = ("gate_proj", "up_proj")
GLM = LLAMA_LIKE.like(
    "glm",
    "GlmForCausalLM",
    {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    flags(qkv_bias="attention_bias"),
    PARTLY_TURNED,
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but(
        dict.fromkeys(_FUSED, "model.layers.{}.mlp.gate_up_proj"),
        fused=(_FUSED,),
        paired=("q_proj", "k_proj"),
    ),
)
GLM4 = GLM.like(
    "glm4",
    "Glm4ForCausalLM",
    {},
    always(norms="around"),
    tensors=GLM.tensors.but(
        {
            "attention_closing_norm": "model.layers.{}.post_self_attn_layernorm",
            "mlp_closing_norm": "model.layers.{}.post_mlp_layernorm",
        }
    ),
)
