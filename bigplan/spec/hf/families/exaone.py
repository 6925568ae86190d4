"""EXAONE 3, a Llama whose files have names of their own, and EXAONE 4.

EXAONE 4 has norms after attention and MLP, and no rope in global blocks between local ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.layer_types import layer_types
from bigplan.spec.hf.families.llama import LLAMA, LLAMA_LIKE, NORMS_AFTER
from bigplan.spec.hf.families.parts import always, written
from bigplan.spec.hf.reader import ConfigReader

_WITHIN = "transformer.h.{}"
_OWN = {
    "embed_tokens": "transformer.wte",
    "input_norm": f"{_WITHIN}.ln_1",
    "q_proj": f"{_WITHIN}.attn.attention.q_proj",
    "k_proj": f"{_WITHIN}.attn.attention.k_proj",
    "v_proj": f"{_WITHIN}.attn.attention.v_proj",
    "o_proj": f"{_WITHIN}.attn.attention.out_proj",
    "post_norm": f"{_WITHIN}.ln_2",
    "gate_proj": f"{_WITHIN}.mlp.c_fc_0",
    "up_proj": f"{_WITHIN}.mlp.c_fc_1",
    "down_proj": f"{_WITHIN}.mlp.c_proj",
    "norm": "transformer.ln_f",
}
_OWN_KEYS = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
EXAONE = (
    LLAMA.like(
        "exaone",
        "LlamaForCausalLM",
        {
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        },
        written(NO_TOKENS),
    )
    .published_as(LLAMA.tensors.but(_OWN))
    .by_old_names(_OWN_KEYS)
)
_PATTERN = "sliding_window_pattern"


def _slides(reader: ConfigReader, block: int) -> bool:
    """By a number of blocks, or a word of L and G, whose last block is global in any case."""
    pattern = reader.get(_PATTERN)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        last = block == reader.count("num_hidden_layers") - 1
        return pattern[block % len(pattern)] == "L" and not last
    return (block + 1) % reader.count(_PATTERN) > 0


_WINDOWS = layer_types(_slides, _PATTERN)


def _read_windows(reader: ConfigReader) -> dict[str, Any]:
    """Without a window rope turns all blocks; with one, only those that have it."""
    if reader.config.get("sliding_window", 0) is None:
        return {"sliding_window": None}
    fields = _WINDOWS.read(reader)
    if fields["sliding_window"] is None:
        reader.refuse("sliding_window", "null where no block has a window: rope would turn none")
    return fields | ({"global_rope": False} if "attention_pattern" in fields else {})


EXAONE4 = LLAMA_LIKE.like(
    "exaone4",
    "Exaone4ForCausalLM",
    {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        _PATTERN: 4,
    },
    always(norms="after", qk_norm=True),
    replace(_WINDOWS, read=_read_windows),
    written(NO_TOKENS),
    tensors=NORMS_AFTER,
)
