"""Apertus: norms of queries and keys, and an MLP without a gate, whose activation is trained.

Apertus 1.5 has words for pictures and sounds behind those of text. Its head gives the first ones
alone (`output_vocab_size`): a text has no others, so that the table's further rows are left out.
"""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_BUT_MLP, LLAMA_TENSORS
from bigplan.spec.hf.families.parts import Part, activation, always, written
from bigplan.spec.hf.families.rope import BESIDE_PARAMETERS, IN_PARAMETERS
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.xielu import EDGE, NEGATIVE, POSITIVE, SLOPE

_NUMBERS = {POSITIVE: "alpha_p", NEGATIVE: "alpha_n", SLOPE: "beta", EDGE: "eps"}
APERTUS = LLAMA_BUT_MLP.like(
    "apertus",
    "ApertusForCausalLM",
    {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "xielu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    activation("hidden_act", {"xielu": "xielu"}, "xielu"),
    ATTENTION_BIAS,
    IN_PARAMETERS,
    always(qk_norm=True),
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but(
        {
            "input_norm": "model.layers.{}.attention_layernorm",
            "post_norm": "model.layers.{}.feedforward_layernorm",
            **{name: f"model.layers.{{}}.mlp.act_fn.{own}" for name, own in _NUMBERS.items()},
        },
        without=("gate_proj",),
        as_number=(SLOPE, EDGE),
    ),
    without=BESIDE_PARAMETERS,
)
_HEAD = "output_vocab_size"


def _read_words(reader: ConfigReader) -> dict[str, Any]:
    every, given = reader.count("vocab_size"), reader.optional_count(_HEAD)
    if given is not None and given < every and reader.flag("tie_word_embeddings"):
        reader.refuse(_HEAD, "null or vocab_size where tie_word_embeddings is true")
    if given is not None and given > every:
        reader.refuse(_HEAD, "at most vocab_size")
    return {"vocab": given or every}


APERTUS_1_5_TEXT = APERTUS.like(
    "apertus1p5_text",
    "Apertus1p5TextForCausalLM",
    {"vocab_size": 266752},
    Part(_read_words, keys={"vocab": (_HEAD, "vocab_size")}),
    tensors=APERTUS.tensors.but({}, longer=("embed_tokens.weight",)),
)
