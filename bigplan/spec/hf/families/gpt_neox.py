"""GPT-NeoX and Pythia, whose queries, keys and values are one matrix, head by head."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, Tensors, family
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LAYER_NORM
from bigplan.spec.hf.families.parts import Part, activation, always, counts, flags, written
from bigplan.spec.hf.families.rope import ROPE_KEYS, read_rope, write_scaling
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_TENSORS = Tensors(
    {
        "embed_tokens": "gpt_neox.embed_in",
        "input_norm": "gpt_neox.layers.{}.input_layernorm",
        "q_proj": "gpt_neox.layers.{}.attention.query_key_value",
        "k_proj": "gpt_neox.layers.{}.attention.query_key_value",
        "v_proj": "gpt_neox.layers.{}.attention.query_key_value",
        "o_proj": "gpt_neox.layers.{}.attention.dense",
        "post_norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "up_proj": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "down_proj": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    },
    fused=(("q_proj", "k_proj", "v_proj"),),
    by_head=("q_proj", "k_proj", "v_proj"),
)
# Names in files written before transformers 5, which reads both.
_OLD = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}


def _read_rope(reader: ConfigReader) -> dict[str, Any]:
    return read_rope(reader.by_old_names(_OLD))


def _write_rope(model: ModelSpec) -> dict[str, Any]:
    return {
        _OLD["partial_rotary_factor"]: model.rotary_fraction,
        _OLD["rope_theta"]: model.rope_theta,
        "rope_scaling": write_scaling(model.rope_scaling),
    }


_ROPE = {
    **ROPE_KEYS,
    "rope_theta": (*ROPE_KEYS["rope_theta"], "rotary_emb_base"),
    "rotary_fraction": (*ROPE_KEYS["rotary_fraction"], "rotary_pct"),
}
GPT_NEOX = family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "use_parallel_residual": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    activation("hidden_act", GELUS, "gelu_new"),
    counts(
        layers="num_hidden_layers",
        hidden="hidden_size",
        ffn="intermediate_size",
        heads="num_attention_heads",
        vocab="vocab_size",
        max_sequence_length="max_position_embeddings",
    ),
    LAYER_NORM,
    always(positions="rope", mlp_bias=True),
    Part(_read_rope, _write_rope, _ROPE),
    flags(parallel_residual="use_parallel_residual", tied_embeddings="tie_word_embeddings"),
    ATTENTION_BIAS,
    written({"attention_dropout": 0.0, "hidden_dropout": 0.0, **NO_TOKENS}),
    tensors=_TENSORS,
)
