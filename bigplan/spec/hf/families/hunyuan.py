"""Hunyuan's dense models: norms of queries and keys that rope has turned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, LLAMA_TENSORS
from bigplan.spec.hf.families.parts import always, written
from bigplan.spec.hf.families.rope import PLACES
from bigplan.spec.hf.reader import ConfigReader

_HUNYUAN = LLAMA_LIKE.like(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    {
        "vocab_size": 290943,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    },
    ATTENTION_BIAS,
    always(qk_norm=True, qk_norm_turned=True),
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but(
        {
            "q_norm": "model.layers.{}.self_attn.query_layernorm",
            "k_norm": "model.layers.{}.self_attn.key_layernorm",
        }
    ),
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Files that scale angles dynamically by an `alpha` have another base, whatever the length."""
    fields = _HUNYUAN.read(reader)
    rope = next((found for place in PLACES if (found := reader.mapping(place))), {})
    alpha = rope.get("alpha")
    if (fields["rope_scaling"] or {}).get("name") == "dynamic" and alpha:
        width = fields.get("head_dim") or fields["hidden"] // fields["heads"]
        fields["rope_theta"] *= alpha ** (width / (width - 2))
        fields["rope_scaling"] = None
    return fields


HUNYUAN = replace(_HUNYUAN, read=_read)
