"""GPT-J and CodeGen: attention and MLP in parallel after one norm, rope's pairs side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import GELUS, NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_TENSORS = Tensors(
    {
        "embed_tokens": "transformer.wte",
        "input_norm": "transformer.h.{}.ln_1",
        "q_proj": "transformer.h.{}.attn.q_proj",
        "k_proj": "transformer.h.{}.attn.k_proj",
        "v_proj": "transformer.h.{}.attn.v_proj",
        "o_proj": "transformer.h.{}.attn.out_proj",
        "up_proj": "transformer.h.{}.mlp.fc_in",
        "down_proj": "transformer.h.{}.mlp.fc_out",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    paired=("q_proj", "k_proj"),
)
_KEYS = {
    "layers": ("n_layer",),
    "hidden": ("n_embd",),
    "ffn": ("n_inner",),
    "heads": ("n_head",),
    "vocab": ("vocab_size",),
    "max_sequence_length": ("n_positions",),
    "norm_epsilon": ("layer_norm_epsilon",),
    "rotary_fraction": ("rotary_dim",),
}
_DEFAULTS = {
    "vocab_size": 50400,
    "n_positions": 2048,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "rotary_dim": 64,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}


def _read(reader: ConfigReader) -> dict[str, Any]:
    activation = reader.text("activation_function")
    if activation not in GELUS:
        reader.refuse("activation_function", ", ".join(GELUS))
    if reader.flag("tie_word_embeddings"):
        reader.refuse("tie_word_embeddings", "false: the head has a bias")
    hidden, heads = reader.count("n_embd"), reader.count("n_head")
    return {
        "layers": reader.count("n_layer"),
        "hidden": hidden,
        "ffn": reader.optional_count("n_inner") or 4 * hidden,
        "heads": heads,
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("n_positions"),
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_epsilon"),
        "mlp": GELUS[activation],
        "positions": "rope",
        "rotary_fraction": reader.count("rotary_dim") * heads / hidden,
        "parallel_residual": True,
        "shared_norm": True,
        "mlp_bias": True,
        "head_bias": True,
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "activation_function": "gelu" if model.mlp == "gelu" else "gelu_new",
        "n_embd": model.hidden,
        "n_inner": model.ffn,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.max_sequence_length,
        "rotary_dim": model.rotary_width,
        "vocab_size": model.vocab,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **NO_TOKENS,
    }


def _read_codegen(reader: ConfigReader) -> dict[str, Any]:
    fields = _read(reader)
    if fields["heads"] % _PARTS:
        reader.refuse("n_head", f"a multiple of {_PARTS}: files have rows in as many parts")
    return fields


def _write_codegen(model: ModelSpec) -> dict[str, Any]:
    return _write(model) | {"model_type": "codegen", "architectures": ["CodeGenForCausalLM"]}


_PARTS = 4  # of queries, values and keys, in this order in each, whatever the heads
_FUSED = ("q_proj", "v_proj", "k_proj")
_IN_PARTS = replace(
    _TENSORS,
    names={**_TENSORS.names, **dict.fromkeys(_FUSED, "transformer.h.{}.attn.qkv_proj")},
    fused=(_FUSED,),
    grouped=dict.fromkeys(_FUSED, lambda model: _PARTS),
)
GPTJ = ModelFamily(_read, _DEFAULTS, _write, _TENSORS, _KEYS)
CODEGEN = ModelFamily(_read_codegen, _DEFAULTS, _write_codegen, _IN_PARTS, _KEYS)
