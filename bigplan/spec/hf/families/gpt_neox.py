"""GPT-NeoX and Pythia, whose queries, keys and values are one matrix, head by head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, ModelFamily, Tensors
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
_KEYS = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),
    "heads": ("num_attention_heads",),
    "vocab": ("vocab_size",),
    "max_sequence_length": ("max_position_embeddings",),
    "norm_epsilon": ("layer_norm_eps",),
    **ROPE_KEYS,
    "rope_theta": (*ROPE_KEYS["rope_theta"], "rotary_emb_base"),
    "rotary_fraction": (*ROPE_KEYS["rotary_fraction"], "rotary_pct"),
}
_DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "use_parallel_residual": True,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
# Names in files written before transformers 5, which reads both.
_OLD = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.text("hidden_act") not in GELUS:
        reader.refuse("hidden_act", ", ".join(GELUS))
    renamed = {new: reader.config[name] for new, name in _OLD.items() if name in reader.config}
    rope = read_rope(replace(reader, config={**renamed, **reader.config}))
    bias = reader.flag("attention_bias")
    return {
        "layers": reader.count("num_hidden_layers"),
        "hidden": reader.count("hidden_size"),
        "ffn": reader.count("intermediate_size"),
        "heads": reader.count("num_attention_heads"),
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("max_position_embeddings"),
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_eps"),
        "mlp": GELUS[reader.text("hidden_act")],
        "positions": "rope",
        **rope,
        "parallel_residual": reader.flag("use_parallel_residual"),
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": True,
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu" if model.mlp == "gelu" else "gelu_new",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_sequence_length,
        "layer_norm_eps": model.norm_epsilon,
        _OLD["partial_rotary_factor"]: model.rotary_fraction,
        _OLD["rope_theta"]: model.rope_theta,
        "rope_scaling": write_scaling(model.rope_scaling),
        "use_parallel_residual": model.parallel_residual,
        "attention_bias": model.qkv_bias,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **NO_TOKENS,
    }


GPT_NEOX = ModelFamily(_read, _DEFAULTS, _write, _TENSORS, _KEYS)
