"""GPT-2, whose queries, keys and values are one matrix, and its matrices [in, out].

GPTBigCode (SantaCoder, StarCoder) is one whose heads may share a key, with matrices [out, in].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_FUSED = ("q_proj", "k_proj", "v_proj")
_TENSORS = Tensors(
    {
        "embed_tokens": "transformer.wte",
        "embed_positions": "transformer.wpe",
        "input_norm": "transformer.h.{}.ln_1",
        "q_proj": "transformer.h.{}.attn.c_attn",
        "k_proj": "transformer.h.{}.attn.c_attn",
        "v_proj": "transformer.h.{}.attn.c_attn",
        "o_proj": "transformer.h.{}.attn.c_proj",
        "post_norm": "transformer.h.{}.ln_2",
        "up_proj": "transformer.h.{}.mlp.c_fc",
        "down_proj": "transformer.h.{}.mlp.c_proj",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    transposed=(*_FUSED, "o_proj", "up_proj", "down_proj"),
    fused=(_FUSED,),
)
_KEYS = {
    "layers": ("n_layer",),
    "hidden": ("n_embd",),
    "ffn": ("n_inner",),
    "heads": ("n_head",),
    "vocab": ("vocab_size",),
    "max_sequence_length": ("n_positions",),
    "norm_epsilon": ("layer_norm_epsilon",),
}
_DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.text("activation_function") not in GELUS:
        reader.refuse("activation_function", ", ".join(GELUS))
    if not reader.flag("scale_attn_weights"):
        reader.refuse("scale_attn_weights", "true")
    hidden = reader.count("n_embd")
    return {
        "layers": reader.count("n_layer"),
        "hidden": hidden,
        "ffn": reader.optional_count("n_inner") or 4 * hidden,
        "heads": reader.count("n_head"),
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("n_positions"),
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_epsilon"),
        "mlp": GELUS[reader.text("activation_function")],
        "positions": "learned",
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu" if model.mlp == "gelu" else "gelu_new",
        "n_embd": model.hidden,
        "n_inner": model.ffn,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.max_sequence_length,
        "vocab_size": model.vocab,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        # transformers' default would be a token that a small vocabulary lacks
        **NO_TOKENS,
    }


def _read_bigcode(reader: ConfigReader) -> dict[str, Any]:
    shared = {"kv_heads": 1} if reader.flag("multi_query") else {}
    return _read(reader) | shared


def _write_bigcode(model: ModelSpec) -> dict[str, Any]:
    return _write(model) | {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "activation_function": "gelu" if model.mlp == "gelu" else "gelu_pytorch_tanh",
        "multi_query": model.kv_heads == 1,
    }


GPT2 = ModelFamily(_read, _DEFAULTS, _write, _TENSORS, _KEYS)
GPT_BIGCODE = ModelFamily(
    _read_bigcode,
    _DEFAULTS
    | {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": True,
    },
    _write_bigcode,
    replace(_TENSORS, transposed=(), by_head=_FUSED),
    _KEYS | {"kv_heads": ("multi_query",)},
)
