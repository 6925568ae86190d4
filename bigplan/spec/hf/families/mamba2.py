"""Mamba-2: blocks of a norm and a state space alone."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.families.mamba import (
    ALONE_FLAGS,
    MAMBA_FUSED,
    keys_of,
    mamba_names,
    read_alone,
    write_alone,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import StateSpace
from bigplan.spec.model import ModelSpec

_COUNTS = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "state": "state_size",
    "taps": "conv_kernel",
}
_LONGEST = 2**20  # tokens: published files tell none, and a state space reads all that there are


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.text("hidden_act") not in ("silu", "swish"):
        reader.refuse("hidden_act", "silu")
    space, hidden = read_alone(reader, _COUNTS), reader.count("hidden_size")
    width = space["heads"] * space["head_dim"]
    if reader.count("expand") * hidden != width:
        reader.refuse("expand", f"num_heads x head_dim, {width}, over hidden_size {hidden}")
    return {
        "layers": reader.count("num_hidden_layers"),
        "hidden": hidden,
        "ffn": 0,
        "heads": space["heads"],  # of attention, which no block has
        "head_dim": space["head_dim"],
        "state_space": space,
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.optional_count("max_position_embeddings") or _LONGEST,
        "norm_epsilon": reader.get("layer_norm_epsilon"),
        "positions": "none",
        "tied_embeddings": reader.flag("tie_word_embeddings"),
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    space = model.state_space or StateSpace(heads=1, head_dim=model.hidden)
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_sequence_length,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        "expand": max(1, space.width // model.hidden),
        **write_alone(space, _COUNTS),
        **NO_TOKENS,
    }


MAMBA2 = ModelFamily(
    _read,
    {
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "hidden_act": "silu",
        "use_conv_bias": True,
        "use_bias": False,
        "time_step_limit": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    _write,
    Tensors(
        {
            "embed_tokens": "backbone.embeddings",
            "input_norm": "backbone.layers.{}.norm",
            **mamba_names("backbone.layers.{}.mixer"),
            "norm": "backbone.norm_f",
            "lm_head": "lm_head",
        },
        fused=MAMBA_FUSED,
    ),
    {
        "layers": ("num_hidden_layers",),
        "hidden": ("hidden_size",),
        "vocab": ("vocab_size",),
        "max_sequence_length": ("max_position_embeddings",),
        "heads": ("num_heads",),
        "head_dim": ("head_dim",),
        "norm_epsilon": ("layer_norm_epsilon",),
        "tied_embeddings": ("tie_word_embeddings",),
        **keys_of(_COUNTS | ALONE_FLAGS),
    },
)
