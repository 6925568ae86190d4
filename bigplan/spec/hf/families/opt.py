"""OPT, whose learned positions begin at their third row."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

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
_KEYS = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("ffn_dim",),
    "heads": ("num_attention_heads",),
    "vocab": ("vocab_size",),
    "max_sequence_length": ("max_position_embeddings",),
}
_DEFAULTS = _SHAPE | {
    "activation_function": "relu",
    "enable_bias": True,
    "tie_word_embeddings": True,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    activation, hidden = reader.text("activation_function"), reader.count("hidden_size")
    if activation not in ("relu", *GELUS):
        reader.refuse("activation_function", ", ".join(("relu", *GELUS)))
    if (reader.optional_count("word_embed_proj_dim") or hidden) != hidden:
        reader.refuse("word_embed_proj_dim", f"hidden_size, which is {hidden}")
    for key, usual in _SHAPE.items():
        if reader.flag(key) is not usual:
            reader.refuse(key, str(usual).lower())
    bias = reader.flag("enable_bias")
    return {
        "layers": reader.count("num_hidden_layers"),
        "hidden": hidden,
        "ffn": reader.count("ffn_dim"),
        "heads": reader.count("num_attention_heads"),
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("max_position_embeddings"),
        "norm": "layernorm",
        "norm_epsilon": 1e-5,  # torch's default; the config has no key for it
        "mlp": "relu" if activation == "relu" else GELUS[activation],
        "positions": "learned",
        "position_offset": 2,
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}.get(model.mlp, "relu"),
        "hidden_size": model.hidden,
        "word_embed_proj_dim": model.hidden,
        "ffn_dim": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.max_sequence_length,
        "vocab_size": model.vocab,
        "do_layer_norm_before": True,
        "enable_bias": model.mlp_bias,
        "tie_word_embeddings": model.tied_embeddings,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        **NO_TOKENS,
    }


OPT = ModelFamily(_read, _DEFAULTS, _write, _TENSORS, _KEYS)
