"""Mellum 2: a Qwen3-MoE some of whose blocks have a window and a base of rope of their own.

Layers that predict further tokens (`num_mtp_layers`) are left out, as transformers does.
"""

from __future__ import annotations

from bigplan.spec.hf.families.dense_blocks import mlp_types
from bigplan.spec.hf.families.experts import EACH, EXPERTS, NORMALISED, QWEN3_MOE, ROUTER
from bigplan.spec.hf.families.layer_types import layer_types, ropes_by_kind
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE
from bigplan.spec.hf.families.parts import always

_BASE = 10000.0  # of blocks with a window, where a file does not tell it


_MELLUM = LLAMA_LIKE.like(
    "mellum",
    "MellumForCausalLM",
    {
        **QWEN3_MOE.defaults,
        "vocab_size": 98304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "moe_intermediate_size": 896,
        "num_hidden_layers": 28,
        "num_attention_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "num_experts": 64,
        "norm_topk_prob": True,
        "mlp_layer_types": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": _BASE},
        },
    },
    ROUTER,
    EACH,
    EXPERTS,
    NORMALISED,
    ATTENTION_BIAS,
    always(qk_norm=True),
    mlp_types(lambda reader: 0),
    layer_types(lambda reader, block: False),
    tensors=QWEN3_MOE.tensors,
)


MELLUM = ropes_by_kind(_MELLUM, lambda reader: _BASE)
