"""Helium, InternLM 3 and IQuest-Coder: Llamas by other names, with defaults of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import LLAMA
from bigplan.spec.hf.families.parts import always, off, unset, written
from bigplan.spec.hf.reader import ConfigReader

HELIUM = LLAMA.like(
    "helium",
    "HeliumForCausalLM",
    {
        "vocab_size": 48000,
        "hidden_size": 2560,
        "intermediate_size": 7040,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
    },
    off("mlp_bias"),
    # The product behind attention has no bias, whatever those before have.
    always(attention_output_bias=False),
    written({"mlp_bias": False, **NO_TOKENS}),
    tensors=LLAMA.tensors.but({}, paired=("q_proj", "k_proj")),
)
_INTERNLM3 = LLAMA.like(
    "internlm3",
    "LlamaForCausalLM",
    {
        "vocab_size": 128512,
        "hidden_size": 4096,
        "intermediate_size": 10240,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
    written(NO_TOKENS),
)


def _read_internlm3(reader: ConfigReader) -> dict[str, Any]:
    """Its own files call the biases by other names."""
    biases = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}
    found = LLAMA.read(reader.by_old_names(biases))
    if found["qkv_bias"] != found["mlp_bias"]:
        known = (*biases.values(), *biases)
        key = next(key for key in known if key in reader.config)
        reader.refuse(key, "the same for queries, keys and values as for all else")
    return found


INTERNLM3 = replace(_INTERNLM3, read=_read_internlm3)
# Keys of its own code that no published model has are refused, as transformers does.
IQUESTCODER = LLAMA.like(
    "iquestcoder",
    "LlamaForCausalLM",
    {
        "vocab_size": 76800,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 80,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "clip_qkv": None,
        "use_sliding_window": False,
    },
    unset("clip_qkv", "null"),
    off("use_sliding_window"),
    written(NO_TOKENS),
)
