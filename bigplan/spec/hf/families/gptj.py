"""GPT-J and CodeGen: attention and MLP in parallel after one norm, rope's pairs side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import Tensors, family
from bigplan.spec.hf.families.gpt2 import SHAPE
from bigplan.spec.hf.families.parts import Part, always, off, written
from bigplan.spec.hf.reader import ConfigReader

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
_TURNED = Part(
    lambda reader: {
        "rotary_fraction": reader.count("rotary_dim")
        * reader.count("n_head")
        / reader.count("n_embd")
    },
    lambda model: {"rotary_dim": model.rotary_width},
    {"rotary_fraction": ("rotary_dim",)},
)
GPTJ = family(
    "gptj",
    "GPTJForCausalLM",
    {
        "vocab_size": 50400,
        "n_positions": 2048,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "rotary_dim": 64,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    off("tie_word_embeddings", "false: the head has a bias"),
    SHAPE,
    _TURNED,
    always(
        positions="rope", parallel_residual=True, shared_norm=True, mlp_bias=True, head_bias=True
    ),
    written({"tie_word_embeddings": False}),
    tensors=_TENSORS,
)
_PARTS = 4  # of queries, values and keys, in this order in each, whatever the heads
_FUSED = ("q_proj", "v_proj", "k_proj")
_CODEGEN = GPTJ.like(
    "codegen",
    "CodeGenForCausalLM",
    {},
    tensors=_TENSORS.but(
        dict.fromkeys(_FUSED, "transformer.h.{}.attn.qkv_proj"),
        fused=(_FUSED,),
        grouped=dict.fromkeys(_FUSED, lambda model: _PARTS),
    ),
)


def _read_codegen(reader: ConfigReader) -> dict[str, Any]:
    fields = _CODEGEN.read(reader)
    if fields["heads"] % _PARTS:
        reader.refuse("n_head", f"a multiple of {_PARTS}: files have rows in as many parts")
    return fields


CODEGEN = replace(_CODEGEN, read=_read_codegen)
