"""BLOOM, whose queries, keys and values are one matrix, head by head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

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
_KEYS = {
    "layers": ("n_layer", "num_hidden_layers"),
    "hidden": ("hidden_size", "n_embed"),
    "heads": ("n_head", "num_attention_heads"),
    "vocab": ("vocab_size",),
    "max_sequence_length": ("seq_length",),
    "norm_epsilon": ("layer_norm_epsilon",),
}
_DEFAULTS = {
    "vocab_size": 250880,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "layer_norm_epsilon": 1e-5,
    "seq_length": 2048,  # published files have this key, transformers' class does not
    "apply_residual_connection_post_layernorm": False,
    "tie_word_embeddings": True,
}
# Names that the published files have.
_OLD = {"hidden_size": "n_embed", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}


def _read(reader: ConfigReader) -> dict[str, Any]:
    renamed = {new: reader.config[old] for new, old in _OLD.items() if old in reader.config}
    reader = replace(reader, config={**renamed, **reader.config})
    if reader.flag("apply_residual_connection_post_layernorm"):
        reader.refuse("apply_residual_connection_post_layernorm", "false")
    hidden = reader.count("hidden_size")
    return {
        "layers": reader.count("n_layer"),
        "hidden": hidden,
        "ffn": 4 * hidden,
        "heads": reader.count("n_head"),
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("seq_length"),
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_epsilon"),
        "embedding_norm": True,
        "mlp": "gelu_tanh",
        "positions": "alibi",
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "vocab_size": model.vocab,
        "seq_length": model.max_sequence_length,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **NO_TOKENS,
    }


BLOOM = ModelFamily(_read, _DEFAULTS, _write, _TENSORS, _KEYS)
