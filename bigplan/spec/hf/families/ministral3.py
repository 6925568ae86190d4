"""Ministral 3: a Mistral whose queries grow with their position beyond YaRN's original length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import MISTRAL
from bigplan.spec.hf.families.parts import Part, written
from bigplan.spec.hf.families.rope import BESIDE_PARAMETERS, IN_PARAMETERS
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

GROWTH = "llama_4_scaling_beta"


def grown_rope(model: ModelSpec) -> dict[str, Any]:
    """Rope in one key; transformers' class wants all of these, also if queries do not grow."""
    growth = model.rope_scaling.query_growth if model.rope_scaling else None
    rope = {
        "original_max_position_embeddings": model.max_sequence_length,
        **IN_PARAMETERS.write(model)["rope_parameters"],
        GROWTH: growth or 0.0,
    }
    return {"rope_parameters": rope}


_MINISTRAL3 = MISTRAL.like(
    "ministral3",
    "Ministral3ForCausalLM",
    {
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
    Part(write=grown_rope, keys={"rope_scaling.query_growth": (f"rope_parameters.{GROWTH}",)}),
    written(NO_TOKENS),
    without=BESIDE_PARAMETERS,
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    fields = _MINISTRAL3.read(reader)
    growth = reader.mapping("rope_parameters").get(GROWTH)
    if growth and fields["rope_scaling"]:
        fields["rope_scaling"] |= {"query_growth": growth}
    return fields


MINISTRAL3 = replace(_MINISTRAL3, read=_read)
