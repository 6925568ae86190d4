"""OLMoE and FlexOlmo: experts behind norms of queries and keys over all heads together.

FlexOlmo's norms of the residual stream stand after attention and experts, as OLMo 2's.
"""

from __future__ import annotations

from bigplan.spec.hf.families.experts import DENSE, EXPERTS, NORMALISED, ROUTER, routed_tensors
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, NORMS_AFTER
from bigplan.spec.hf.families.parts import always, joined, unset, written

_TENSORS = routed_tensors("mlp", dense=False)
_BOTH = joined(
    ROUTER,
    EXPERTS,
    NORMALISED,
    ATTENTION_BIAS,
    always(qk_norm=True, qk_norm_whole=True),
    written(NO_TOKENS),
)
OLMOE = LLAMA_LIKE.like(
    "olmoe",
    "OlmoeForCausalLM",
    {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "clip_qkv": None,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
    },
    unset("clip_qkv", "null: queries, keys and values as they are"),
    _BOTH,
    tensors=_TENSORS,
)
FLEX_OLMO = LLAMA_LIKE.like(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    {
        "vocab_size": 100352,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "num_experts_per_tok": 5,
        "num_experts": 7,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
    },
    _BOTH,
    always(norms="after"),
    tensors=_TENSORS.but(NORMS_AFTER.names).but({}, without=("input_norm", "post_norm", *DENSE)),
)
