"""The text models of Gemma 4: heads of two widths, keys that are values in global blocks.

26B A4B has experts beside the MLP of each block, each with norms of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bigplan.spec.carried import INPUTS_NORM, OWN_DOWN, OWN_GATE, TABLES, TO_INPUTS
from bigplan.spec.expert_steps import EXPERT_SCALES
from bigplan.spec.hf.families.experts import FIRST, shared_names, stacked_names
from bigplan.spec.hf.families.gemma import AROUND_TENSORS, GEGLU
from bigplan.spec.hf.families.layer_types import (
    read_layer_types,
    ropes_by_kind,
    write_layer_types,
)
from bigplan.spec.hf.families.llama import HEADS
from bigplan.spec.hf.families.parts import Part, always, counts, only, values
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import BLOCK_SCALE
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import expanded

_LOCAL_BASE = 10000.0
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": _LOCAL_BASE},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
    },
}


def _read_windows(reader: ConfigReader) -> dict[str, Any]:
    blocks = reader.count("num_hidden_layers")
    types = reader.texts("layer_types")
    if types and types[-1] != "full_attention":
        reader.refuse("layer_types", "full_attention for the last block, as transformers makes it")
    local = [number % 6 > 0 for number in range(1, blocks)] + [False]
    fields = read_layer_types(reader, local)
    slides = "sliding_attention" in types if types else any(local)
    if slides and fields["sliding_window"] is None:
        reader.refuse("sliding_window", "a number of tokens")
    return fields


def _write_windows(model: ModelSpec) -> dict[str, Any]:
    window = model.sliding_window
    told = {} if window is None else {"sliding_window": window}
    return {"layer_types": write_layer_types(model), **told}


def _read_heads(reader: ConfigReader) -> dict[str, Any]:
    """Those of global blocks, or of all where all are global; empty: as those of others.

    Published files name them by keys of their own, newer ones of transformers by block.
    """
    keys_as_values = reader.flag("attention_k_eq_v")
    heads = {"head_dim": reader.count("head_dim"), "kv_heads": HEADS.read(reader)["kv_heads"]}
    pattern = _read_windows(reader).get("attention_pattern", ())
    if reader.mapping("per_layer_config"):
        far = heads | _by_block(reader, pattern)
    else:
        number = reader.optional_count("num_global_key_value_heads") if keys_as_values else None
        far = {
            "head_dim": reader.count("global_head_dim"),
            "kv_heads": number or heads["kv_heads"],
        }
    if not pattern:
        return far | {"keys_as_values": keys_as_values}
    if far == heads and not keys_as_values:
        return {}
    return {"global_heads": far | {"keys_as_values": keys_as_values}}


def _by_block(reader: ConfigReader, pattern: Sequence[str]) -> dict[str, Any]:
    """Heads of global blocks by `per_layer_config`, which has the same for each of them."""
    names = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
    found = dict(reader.mapping("per_layer_config"))
    blocks = reader.count("num_hidden_layers")
    local = expanded(pattern, blocks) or (False,) * blocks
    wanted = {block for block, one in enumerate(local) if not one}
    told = {int(key) if str(key).isdecimal() else -1 for key in found}  # "05" in some files
    first = next(iter(found.values()))
    alike = all(one == first for one in found.values()) and isinstance(first, dict)
    if told != wanted or not alike or not {*first} <= {*names}:
        reader.refuse(
            "per_layer_config", f"the same {' and '.join(names)} for each full_attention block"
        )
    return {names[key]: value for key, value in first.items()}


def _write_heads(model: ModelSpec) -> dict[str, Any]:
    far = model.global_heads or model
    return {
        "global_head_dim": far.head_dim,
        "num_global_key_value_heads": far.kv_heads,
        "attention_k_eq_v": far.keys_as_values,
    }


_HEADS = {
    "keys_as_values": ("attention_k_eq_v",),
    "global_heads.head_dim": ("global_head_dim", "per_layer_config"),
    "global_heads.kv_heads": ("num_global_key_value_heads", "per_layer_config"),
}


_ROUTED = counts(
    ffn="moe_intermediate_size",
    shared_ffn="intermediate_size",
    experts="num_experts",
    experts_per_token="top_k_experts",
)


def _read_experts(reader: ConfigReader) -> dict[str, Any]:
    """Those beside the MLP of each block, if any; transformers balances them by no loss."""
    if not reader.flag("enable_moe_block"):
        return {}
    shares = {"score_scale": reader.count("hidden_size") ** -0.5, "expert_scales": True}
    return {**_ROUTED.read(reader), "expert_norms": "each", "routing": shares}


def _write_experts(model: ModelSpec) -> dict[str, Any]:
    return {"enable_moe_block": True, **_ROUTED.write(model)} if model.experts else {}


_EXPERTS = {
    **_ROUTED.keys,
    "ffn": ("moe_intermediate_size", "intermediate_size"),
    "expert_norms": ("enable_moe_block",),
}


def _read_carried(reader: ConfigReader) -> dict[str, Any]:
    """Inputs of blocks, and keys and values that the last ones read (E2B and E4B)."""
    found: dict[str, Any] = {}
    if reader.get("hidden_size_per_layer_input"):
        if reader.count("vocab_size_per_layer_input") != reader.count("vocab_size"):
            reader.refuse("vocab_size_per_layer_input", "as many as vocab_size")
        found["block_inputs"] = {"width": reader.count("hidden_size_per_layer_input")}
    if reader.get("num_kv_shared_layers"):
        wide = 2 if reader.flag("use_double_wide_mlp") else 1
        blocks = reader.count("num_kv_shared_layers")
        found["key_sharing"] = {"blocks": blocks, "ffn": wide * reader.count("intermediate_size")}
    return found


def _write_carried(model: ModelSpec) -> dict[str, Any]:
    inputs, sharing = model.block_inputs, model.key_sharing
    told = {
        "hidden_size_per_layer_input": inputs.width if inputs else 0,
        "vocab_size_per_layer_input": model.vocab,
    }
    if sharing is None:
        return told
    wide = sharing.ffn == 2 * model.ffn
    return {**told, "num_kv_shared_layers": sharing.blocks, "use_double_wide_mlp": wide}


_CARRIED = {
    "block_inputs": ("hidden_size_per_layer_input",),
    "key_sharing": ("num_kv_shared_layers",),
}
_WITHIN = "model.layers.{}"
_GEMMA4 = GEGLU.like(
    "gemma4_text",
    "Gemma4ForCausalLM",
    {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_parameters": _ROPES,
        "sliding_window": 512,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": None,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
    },
    only(
        "use_bidirectional_attention",
        "null or vision: tokens of text see those before",
        lambda reader: reader.get("use_bidirectional_attention") in (None, False, "vision"),
    ),
    Part(_read_windows, _write_windows, {"attention_pattern": ("layer_types",)}),
    # Norms of queries and keys have trained weights: scores are not divided by a root.
    always(norms="around", qk_norm=True, value_norm=True, block_scale=True, score_scale=1.0),
    values(logit_cap="final_logit_softcapping"),
    Part(_read_heads, _write_heads, _HEADS),
    Part(_read_experts, _write_experts, _EXPERTS),
    Part(_read_carried, _write_carried, _CARRIED),
    tensors=AROUND_TENSORS.but(
        {
            BLOCK_SCALE: f"{_WITHIN}.layer_scalar",
            TABLES: "model.embed_tokens_per_layer.weight",
            TO_INPUTS: "model.per_layer_model_projection",
            INPUTS_NORM: "model.per_layer_projection_norm",
            OWN_GATE: f"{_WITHIN}.per_layer_input_gate",
            OWN_DOWN: f"{_WITHIN}.per_layer_projection",
            "own_closing_norm": f"{_WITHIN}.post_per_layer_input_norm",
            **shared_names(f"{_WITHIN}.mlp"),
            "shared_closing_norm": f"{_WITHIN}.post_feedforward_layernorm_1",
            "expert_norm": f"{_WITHIN}.pre_feedforward_layernorm_2",
            "expert_closing_norm": f"{_WITHIN}.post_feedforward_layernorm_2",
            "router_norm.weight": f"{_WITHIN}.router.scale",
            "router": f"{_WITHIN}.router.proj",
            EXPERT_SCALES: f"{_WITHIN}.router.per_expert_scale",
            **stacked_names(f"{_WITHIN}.experts.gate_up_proj", f"{_WITHIN}.experts.down_proj"),
        },
        fused=(FIRST,),
        transposed=("experts.down_proj.weight",),
    ),
)
_BY_KIND = ropes_by_kind(_GEMMA4, lambda reader: _LOCAL_BASE)


def _read(reader: ConfigReader) -> dict[str, Any]:
    if not reader.mapping("rope_parameters"):  # null, too, means the class's own
        reader = reader.saying({"rope_parameters": _ROPES})
    return _BY_KIND.read(reader)


GEMMA4 = replace(_BY_KIND, read=_read)
# The text model of Gemma 4 12B, whose files have no tower but read pictures and sound all the same.
GEMMA4_UNIFIED = GEMMA4.like(
    "gemma4_unified_text",
    "Gemma4UnifiedForCausalLM",
    {
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0,
    },
)
