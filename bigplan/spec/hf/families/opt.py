"""OPT, whose learned positions begin at their third row."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, Tensors, family
from bigplan.spec.hf.families.parts import Part, activation, always, counts, flags, written
from bigplan.spec.hf.reader import ConfigReader

_TENSORS = Tensors(
    {
        "embed_tokens": "model.decoder.embed_tokens",
        "embed_positions": "model.decoder.embed_positions",
        "input_norm": "model.decoder.layers.{}.self_attn_layer_norm",
        "q_proj": "model.decoder.layers.{}.self_attn.q_proj",
        "k_proj": "model.decoder.layers.{}.self_attn.k_proj",
        "v_proj": "model.decoder.layers.{}.self_attn.v_proj",
        "o_proj": "model.decoder.layers.{}.self_attn.out_proj",
        "post_norm": "model.decoder.layers.{}.final_layer_norm",
        "up_proj": "model.decoder.layers.{}.fc1",
        "down_proj": "model.decoder.layers.{}.fc2",
        "norm": "model.decoder.final_layer_norm",
        "lm_head": "lm_head",
    }
)
# Values that the larger OPT models share; opt-350m differs.
_SHAPE = {
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
}


def _as_the_larger(reader: ConfigReader) -> dict[str, Any]:
    hidden = reader.count("hidden_size")
    if (reader.optional_count("word_embed_proj_dim") or hidden) != hidden:
        reader.refuse("word_embed_proj_dim", f"hidden_size, which is {hidden}")
    for key, usual in _SHAPE.items():
        if reader.flag(key) is not usual:
            reader.refuse(key, str(usual).lower())
    return {}


OPT = family(
    "opt",
    "OPTForCausalLM",
    {
        **_SHAPE,
        "activation_function": "relu",
        "enable_bias": True,
        "tie_word_embeddings": True,
    },
    activation("activation_function", {"relu": "relu", **GELUS}, "gelu_new"),
    Part(_as_the_larger, lambda model: {"word_embed_proj_dim": model.hidden}),
    counts(
        layers="num_hidden_layers",
        hidden="hidden_size",
        ffn="ffn_dim",
        heads="num_attention_heads",
        vocab="vocab_size",
        max_sequence_length="max_position_embeddings",
    ),
    # torch's default of epsilon; the config has no key for it.
    always(norm="layernorm", norm_epsilon=1e-5, positions="learned", position_offset=2),
    flags(qkv_bias="enable_bias", attention_output_bias="enable_bias", mlp_bias="enable_bias"),
    flags(tied_embeddings="tie_word_embeddings"),
    written({"do_layer_norm_before": True, "dropout": 0.0, "attention_dropout": 0.0}),
    written({"layerdrop": 0.0, **NO_TOKENS}),
    tensors=_TENSORS,
)
