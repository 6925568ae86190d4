"""GPT-NeoX and Pythia. Their fused query_key_value is read as three matrices of the same sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.families.family import Family
from bigplan.spec.families.gelu import GELUS
from bigplan.spec.families.rope import read_rope
from bigplan.spec.hf_reader import Reader

_DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "use_parallel_residual": True,
    "attention_bias": True,
    "tie_word_embeddings": False,
}


def _read(reader: Reader) -> dict[str, Any]:
    if reader.text("hidden_act") not in GELUS:
        reader.refuse("hidden_act", ", ".join(GELUS))
    # Files written before transformers 5 name rotary_pct and rotary_emb_base.
    old = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
    renamed = {new: reader.config[name] for new, name in old.items() if name in reader.config}
    rope = read_rope(replace(reader, config={**renamed, **reader.config}))
    bias = reader.flag("attention_bias")
    return {
        "layers": reader.count("num_hidden_layers"),
        "hidden": reader.count("hidden_size"),
        "ffn": reader.count("intermediate_size"),
        "heads": reader.count("num_attention_heads"),
        "vocab": reader.count("vocab_size"),
        "max_sequence_length": reader.count("max_position_embeddings"),
        "norm": "layernorm",
        "norm_epsilon": reader.get("layer_norm_eps"),
        "mlp": GELUS[reader.text("hidden_act")],
        "positions": "rope",
        **rope,
        "parallel_residual": reader.flag("use_parallel_residual"),
        "tied_embeddings": reader.flag("tie_word_embeddings"),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": True,
    }


GPT_NEOX = Family(_read, _DEFAULTS)
