"""Mamba-2: blocks of a norm and a state space alone."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, Tensors, family
from bigplan.spec.hf.families.mamba import (
    ALONE_FLAGS,
    MAMBA_FUSED,
    keys_of,
    mamba_names,
    read_alone,
    write_alone,
)
from bigplan.spec.hf.families.parts import Part, always, counts, flags, values, written
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


def _read_space(reader: ConfigReader) -> dict[str, Any]:
    if reader.text("hidden_act") not in ("silu", "swish"):
        reader.refuse("hidden_act", "silu")
    space, hidden = read_alone(reader, _COUNTS), reader.count("hidden_size")
    width = space["heads"] * space["head_dim"]
    if reader.count("expand") * hidden != width:
        reader.refuse("expand", f"num_heads x head_dim, {width}, over hidden_size {hidden}")
    return {
        "heads": space["heads"],  # of attention, which no block has
        "head_dim": space["head_dim"],
        "state_space": space,
    }


def _write_space(model: ModelSpec) -> dict[str, Any]:
    space = model.state_space or StateSpace(heads=1, head_dim=model.hidden)
    return {
        "hidden_act": "silu",
        "expand": max(1, space.width // model.hidden),
        **write_alone(space, _COUNTS),
    }


_SPACE = keys_of(_COUNTS | ALONE_FLAGS) | {"heads": ("num_heads",), "head_dim": ("head_dim",)}
_LONG = Part(
    lambda reader: {
        "max_sequence_length": reader.optional_count("max_position_embeddings") or _LONGEST
    },
    lambda model: {"max_position_embeddings": model.max_sequence_length},
    {"max_sequence_length": ("max_position_embeddings",)},
)
MAMBA2 = family(
    "mamba2",
    "Mamba2ForCausalLM",
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
    counts(layers="num_hidden_layers", hidden="hidden_size", vocab="vocab_size"),
    Part(_read_space, _write_space, _SPACE),
    _LONG,
    values(norm_epsilon="layer_norm_epsilon"),
    flags(tied_embeddings="tie_word_embeddings"),
    always(ffn=0, positions="none"),
    written(NO_TOKENS),
    tensors=Tensors(
        {
            "embed_tokens": "backbone.embeddings",
            "input_norm": "backbone.layers.{}.norm",
            **mamba_names("backbone.layers.{}.mixer"),
            "norm": "backbone.norm_f",
            "lm_head": "lm_head",
        },
        fused=MAMBA_FUSED,
    ),
)
