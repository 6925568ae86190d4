"""MPT: ALiBi, no biases, and queries, keys and values in one matrix.

transformers' class reads few of the keys that the files have; where one says something else than
the class does, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, Tensors, family
from bigplan.spec.hf.families.parts import Part, always, counts, flags, values, written
from bigplan.spec.hf.reader import ConfigReader

_FUSED = ("q_proj", "k_proj", "v_proj")
_TENSORS = Tensors(
    {
        "embed_tokens": "transformer.wte",
        "input_norm": "transformer.blocks.{}.norm_1",
        **dict.fromkeys(_FUSED, "transformer.blocks.{}.attn.Wqkv"),
        "o_proj": "transformer.blocks.{}.attn.out_proj",
        "post_norm": "transformer.blocks.{}.norm_2",
        "up_proj": "transformer.blocks.{}.ffn.up_proj",
        "down_proj": "transformer.blocks.{}.ffn.down_proj",
        "norm": "transformer.norm_f",
        "lm_head": "lm_head",
    },
    fused=(_FUSED,),
)
_RATIO = 4  # of the MLP's width to the model's, whatever `expansion_ratio` says
# Of `attn_config`: what the class computes.
_ATTENTION: Mapping[str, Any] = {
    "attn_type": "multihead_attention",
    "clip_qkv": None,
    "softmax_scale": None,
    "prefix_lm": False,
    "qk_ln": False,
    "alibi": True,
    "alibi_bias_max": 8,
}
_ATTENTION_KEY = "attn_config"


def _as_the_class(reader: ConfigReader) -> dict[str, Any]:
    attention = reader.mapping(_ATTENTION_KEY)
    for key, value in _ATTENTION.items():
        if attention.get(key, value) != value:
            reader.refuse(_ATTENTION_KEY, f"{key} {value}")
    for key, told in {"expansion_ratio": _RATIO, "no_bias": True, "logit_scale": None}.items():
        if reader.get(key) != told:
            reader.refuse(key, str(told))
    return {"ffn": _RATIO * reader.count("d_model")}


MPT = family(
    "mpt",
    "MptForCausalLM",
    {
        "vocab_size": 50368,
        "d_model": 2048,
        "n_layers": 24,
        "n_heads": 16,
        "max_seq_len": 2048,
        "expansion_ratio": _RATIO,
        "layer_norm_epsilon": 1e-5,
        "no_bias": True,
        "logit_scale": None,
        "tie_word_embeddings": True,
    },
    Part(_as_the_class),
    counts(
        layers="n_layers",
        hidden="d_model",
        heads="n_heads",
        vocab="vocab_size",
        max_sequence_length="max_seq_len",
    ),
    values(norm_epsilon="layer_norm_epsilon"),
    always(norm="layernorm", norm_bias=False, mlp="gelu", positions="alibi"),
    flags(tied_embeddings="tie_word_embeddings"),
    written(NO_TOKENS),
    tensors=_TENSORS,
)
