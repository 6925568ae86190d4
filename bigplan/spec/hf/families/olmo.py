"""OLMo, whose norms have no weights; OLMo 2 and 3, whose norms stand after attention and MLP."""

from __future__ import annotations

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.layer_types import layer_types, ropes_by_kind
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, NORMS_AFTER, OF_RMSNORM
from bigplan.spec.hf.families.parts import always, unset, written
from bigplan.spec.hf.families.rope import read_rope

_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
OLMO = LLAMA_LIKE.like(
    "olmo",
    "OlmoForCausalLM",
    _DEFAULTS | {"clip_qkv": None},
    unset("clip_qkv", "null: queries, keys and values are not clipped"),
    # Its code has this epsilon, and no key.
    always(norm="layernorm", norm_bias=False, norm_epsilon=1e-5, weightless_norms="all"),
    ATTENTION_BIAS,
    written({"clip_qkv": None, **NO_TOKENS}),
    without=(*OF_RMSNORM, "head_dim"),
)
OLMO2 = LLAMA_LIKE.like(
    "olmo2",
    "Olmo2ForCausalLM",
    _DEFAULTS,
    always(norms="after", qk_norm=True, qk_norm_whole=True),
    ATTENTION_BIAS,
    written(NO_TOKENS),
    tensors=NORMS_AFTER,
)
_THIRD = OLMO2.like(
    "olmo3",
    "Olmo3ForCausalLM",
    {"rope_theta": 500000.0, "sliding_window": 4096},
    layer_types(lambda reader, block: (block + 1) % 4 > 0),
)
# Angles of blocks with a window are not scaled; older files say so of all in one key.
OLMO3 = ropes_by_kind(_THIRD, lambda reader: read_rope(reader)["rope_theta"])
