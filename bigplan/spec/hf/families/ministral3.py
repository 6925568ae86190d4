"""Ministral 3: a Mistral whose queries grow with their position beyond YaRN's original length."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.llama import LLAMA_DEFAULTS, MISTRAL
from bigplan.spec.hf.families.rope import write_parameters
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

GROWTH = "llama_4_scaling_beta"


def _read(reader: ConfigReader) -> dict[str, Any]:
    fields = MISTRAL.read(reader)
    growth = reader.mapping("rope_parameters").get(GROWTH)
    if growth and fields["rope_scaling"]:
        fields["rope_scaling"] |= {"query_growth": growth}
    return fields


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_parameters(MISTRAL.write(model))
    scaling = model.rope_scaling
    # transformers' class wants both keys, also of queries that do not grow
    config["rope_parameters"] = {
        "original_max_position_embeddings": model.max_sequence_length,
        **config["rope_parameters"],
        GROWTH: (scaling.query_growth if scaling else None) or 0.0,
    }
    named = {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}
    return {**config, **named, **NO_TOKENS}


MINISTRAL3 = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            GROWTH: 0.1,
        },
    },
    _write,
    MISTRAL.tensors,
    {**MISTRAL.keys, "rope_scaling.query_growth": (f"rope_parameters.{GROWTH}",)},
)
