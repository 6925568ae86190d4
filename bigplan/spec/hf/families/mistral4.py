"""Mistral 4: DeepSeek's latent attention, whose queries grow with their position, and experts.

Routers take a softmax. A group of experts counts by the sum of its two best shares.
"""

from __future__ import annotations

from dataclasses import replace
from math import isclose
from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.deepseek import DEEPSEEK_V3, EXPERTS, LATENT
from bigplan.spec.hf.families.experts import DENSE, FIRST, stacked_names
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.ministral3 import GROWTH, grown_rope
from bigplan.spec.hf.families.parts import Part, written
from bigplan.spec.hf.families.rope import BESIDE_PARAMETERS
from bigplan.spec.hf.reader import ConfigReader

_ROPE = "rope_parameters"
_PART = "partial_rotary_factor"  # of a head's columns: rope's
_WITHIN = "model.layers.{}.mlp.experts"
_MISTRAL4 = LATENT.like(
    "mistral4",
    "Mistral4ForCausalLM",
    {
        **DEEPSEEK_V3.defaults,
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "max_position_embeddings": 1048576,
        _ROPE: {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            GROWTH: 0.1,
        },
    },
    EXPERTS,
    Part(write=grown_rope, keys={"rope_scaling.query_growth": (f"{_ROPE}.{GROWTH}",)}),
    Part(write=lambda model: {"head_dim": model.head_dim}),
    written(NO_TOKENS),
    tensors=LATENT.tensors.but(
        stacked_names(f"{_WITHIN}.gate_up_proj", f"{_WITHIN}.down_proj"),
        without=(ROUTER_BIAS, *(f"experts.{name}" for name in DENSE)),
        fused=(*LATENT.tensors.fused, FIRST),
        transposed=("experts.down_proj.weight",),
    ),
    without=BESIDE_PARAMETERS,
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    rope = dict(reader.mapping(_ROPE) or reader.defaults[_ROPE])
    growth = rope.pop(GROWTH, None)
    of_rope, plain = (reader.count(f"qk_{part}_head_dim") for part in ("rope", "nope"))
    part = of_rope / (of_rope + plain)
    if not isclose(rope.pop(_PART, part), part):
        reader.refuse(_ROPE, f"{_PART} {part:g}: rope turns qk_rope_head_dim columns")
    fields = _MISTRAL4.read(reader.saying({_ROPE: rope}))
    if growth and fields["rope_scaling"]:
        fields["rope_scaling"] |= {"query_growth": growth}
    if "routing" in fields:
        fields["routing"] |= {"scores": "softmax", "bias": False}
    return fields


MISTRAL4 = replace(_MISTRAL4, read=_read)
