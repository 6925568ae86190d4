"""Mistral 4: DeepSeek's latent attention, whose queries grow with their position, and experts.

Routers take a softmax. A group of experts counts by the sum of its two best shares.
"""

from __future__ import annotations

from math import isclose
from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.deepseek import DEEPSEEK_V3, read_deepseek, write_deepseek
from bigplan.spec.hf.families.experts import DENSE, FIRST, stacked_names
from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.ministral3 import GROWTH, grown_rope
from bigplan.spec.hf.families.rope import BESIDE_PARAMETERS
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_ROPE = "rope_parameters"
_PART = "partial_rotary_factor"  # of a head's columns: rope's
_EXPERTS = "model.layers.{}.mlp.experts"


def _read(reader: ConfigReader) -> dict[str, Any]:
    rope = dict(reader.mapping(_ROPE) or MISTRAL4.defaults[_ROPE])
    growth = rope.pop(GROWTH, None)
    of_rope, plain = (reader.count(f"qk_{part}_head_dim") for part in ("rope", "nope"))
    part = of_rope / (of_rope + plain)
    if not isclose(rope.pop(_PART, part), part):
        reader.refuse(_ROPE, f"{_PART} {part:g}: rope turns qk_rope_head_dim columns")
    fields = read_deepseek(reader.saying({_ROPE: rope}))
    if growth and fields["rope_scaling"]:
        fields["rope_scaling"] |= {"query_growth": growth}
    if "routing" in fields:
        fields["routing"] |= {"scores": "softmax", "bias": False}
    return fields


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_deepseek(model, "mistral4", "Mistral4ForCausalLM")
    others = {key: value for key, value in config.items() if key not in BESIDE_PARAMETERS}
    return {**others, **grown_rope(model), "head_dim": model.head_dim, **NO_TOKENS}


MISTRAL4 = ModelFamily(
    _read,
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
    _write,
    DEEPSEEK_V3.tensors.but(
        stacked_names(f"{_EXPERTS}.gate_up_proj", f"{_EXPERTS}.down_proj"),
        without=(ROUTER_BIAS, *(f"experts.{name}" for name in DENSE)),
        fused=(*DEEPSEEK_V3.tensors.fused, FIRST),
        transposed=("experts.down_proj.weight",),
    ),
    {**DEEPSEEK_V3.keys, "rope_scaling.query_growth": (f"{_ROPE}.{GROWTH}",)},
)
