"""BLOOM, whose queries, keys and values are one matrix, head by head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, Tensors, family
from bigplan.spec.hf.families.parts import BIASES, Part, always, counts, flags, off, values, written
from bigplan.spec.hf.reader import ConfigReader

_TENSORS = Tensors(
    {
        "embed_tokens": "transformer.word_embeddings",
        "embed_norm": "transformer.word_embeddings_layernorm",
        "input_norm": "transformer.h.{}.input_layernorm",
        "q_proj": "transformer.h.{}.self_attention.query_key_value",
        "k_proj": "transformer.h.{}.self_attention.query_key_value",
        "v_proj": "transformer.h.{}.self_attention.query_key_value",
        "o_proj": "transformer.h.{}.self_attention.dense",
        "post_norm": "transformer.h.{}.post_attention_layernorm",
        "up_proj": "transformer.h.{}.mlp.dense_h_to_4h",
        "down_proj": "transformer.h.{}.mlp.dense_4h_to_h",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    fused=(("q_proj", "k_proj", "v_proj"),),
    by_head=("q_proj", "k_proj", "v_proj"),
)
# Names that the published files have.
_OLD = {"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
_OLD_KEYS = {
    "layers": ("n_layer", "num_hidden_layers"),
    "hidden": ("hidden_size", "n_embed"),
    "heads": ("n_head", "num_attention_heads"),
}
_BLOOM = family(
    "bloom",
    "BloomForCausalLM",
    {
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "layer_norm_epsilon": 1e-5,
        "seq_length": 2048,  # published files have this key, transformers' class does not
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    },
    off("apply_residual_connection_post_layernorm"),
    counts(
        layers="n_layer",
        hidden="hidden_size",
        heads="n_head",
        vocab="vocab_size",
        max_sequence_length="seq_length",
    ),
    Part(lambda reader: {"ffn": 4 * reader.count("hidden_size")}, keys=_OLD_KEYS),
    values(norm_epsilon="layer_norm_epsilon"),
    always(norm="layernorm", embedding_norm=True, mlp="gelu_tanh", positions="alibi"),
    BIASES,
    flags(tied_embeddings="tie_word_embeddings"),
    written({"attention_dropout": 0.0, "hidden_dropout": 0.0, **NO_TOKENS}),
    tensors=_TENSORS,
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    return _BLOOM.read(reader.by_old_names(_OLD))


BLOOM = replace(_BLOOM, read=_read)
