"""Solar Open: GLM-4.5's experts in every block, behind plain attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import LLAMA_LIKE
from bigplan.spec.hf.families.parts import flags, off, only, written
from bigplan.spec.hf.families.shared_experts import DEEPSEEK_EXPERTS, GLM4_MOE, UNUSED_LOSS
from bigplan.spec.hf.reader import ConfigReader

_FIRST = "first_k_dense_replace"
_SOLAR_OPEN = LLAMA_LIKE.like(
    "solar_open",
    "SolarOpenForCausalLM",
    {
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
    # Of first blocks' width, which files still tell, transformers' class makes nothing.
    only(_FIRST, "0: experts in all blocks", lambda reader: reader.count(_FIRST, least=0) == 0),
    off("use_qk_norm"),
    DEEPSEEK_EXPERTS,
    UNUSED_LOSS,
    flags(qkv_bias="attention_bias"),
    written(NO_TOKENS),
    tensors=GLM4_MOE.tensors,
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    fields = _SOLAR_OPEN.read(reader)
    if fields["rotary_fraction"] != 1:
        reader.refuse("partial_rotary_factor", "1: rope turns all columns")
    return fields


SOLAR_OPEN = replace(_SOLAR_OPEN, read=_read)
