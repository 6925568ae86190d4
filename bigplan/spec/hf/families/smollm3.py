"""SmolLM3: a Llama some of whose blocks have no rope."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.layer_types import turned_blocks, write_turned
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, MLP_BIAS
from bigplan.spec.hf.families.parts import Part, off, written
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.pattern import compact


def _read_pattern(reader: ConfigReader) -> dict[str, Any]:
    """Blocks with rope are local ones without a window; `no_rope_layers` has a 1 for each."""
    turned = turned_blocks(reader)
    if all(turned):
        return {}
    return {"attention_pattern": compact(turned), "global_rope": False}


SMOLLM3 = LLAMA_LIKE.like(
    "smollm3",
    "SmolLM3ForCausalLM",
    {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    },
    off("use_sliding_window", "false: blocks with windows would have no rope"),
    Part(
        _read_pattern,
        lambda model: {"no_rope_layers": write_turned(model)},
        {"attention_pattern": ("no_rope_layers",)},
    ),
    ATTENTION_BIAS,
    MLP_BIAS,
    written({"use_sliding_window": False, **NO_TOKENS}),
)
