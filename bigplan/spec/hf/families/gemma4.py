"""The text models of Gemma 4: heads of two widths, keys that are values in global blocks.

26B A4B has experts beside the MLP of each block, each with norms of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.carried import INPUTS_NORM, OWN_DOWN, OWN_GATE, TABLES, TO_INPUTS
from bigplan.spec.expert_steps import EXPERT_SCALES
from bigplan.spec.hf.families.experts import DENSE
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.gemma import AROUND_TENSORS, read_geglu, write_gemma
from bigplan.spec.hf.families.layer_types import (
    read_layer_types,
    read_ropes,
    write_layer_types,
    write_ropes,
)
from bigplan.spec.hf.families.llama import LLAMA_DEFAULTS, LLAMA_KEYS
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


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Scores are not divided by the root of a head's width, since norms have trained weights."""
    if reader.get("use_bidirectional_attention") not in (None, False, "vision"):
        reader.refuse(
            "use_bidirectional_attention", "null or vision: tokens of text see those before"
        )
    if reader.mapping("rope_parameters") == {}:  # null, too, means the class's own
        reader = replace(reader, config={**reader.config, "rope_parameters": _ROPES})
    blocks = reader.count("num_hidden_layers")
    types = reader.texts("layer_types")
    if types and types[-1] != "full_attention":
        reader.refuse("layer_types", "full_attention for the last block, as transformers makes it")
    local = [number % 6 > 0 for number in range(1, blocks)] + [False]
    fields = (
        read_geglu(reader)
        | read_layer_types(reader, local)
        | {
            "norms": "around",
            "qk_norm": True,
            "value_norm": True,
            "block_scale": True,
            "score_scale": 1.0,
            "logit_cap": reader.get("final_logit_softcapping"),
        }
    )
    slides = "sliding_attention" in types if types else any(local)
    if slides and fields["sliding_window"] is None:
        reader.refuse("sliding_window", "a number of tokens")
    fields = read_ropes(reader, fields, _LOCAL_BASE)
    fields |= _read_heads(reader, fields) | _read_experts(reader)
    return fields | _read_carried(reader, fields)


def _read_carried(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Inputs of blocks, and keys and values that the last ones read (E2B and E4B)."""
    found: dict[str, Any] = {}
    if reader.get("hidden_size_per_layer_input"):
        if reader.count("vocab_size_per_layer_input") != fields["vocab"]:
            reader.refuse("vocab_size_per_layer_input", "as many as vocab_size")
        found["block_inputs"] = {"width": reader.count("hidden_size_per_layer_input")}
    if reader.get("num_kv_shared_layers"):
        wide = 2 if reader.flag("use_double_wide_mlp") else 1
        blocks = reader.count("num_kv_shared_layers")
        found["key_sharing"] = {"blocks": blocks, "ffn": wide * fields["ffn"]}
    return found


def _read_experts(reader: ConfigReader) -> dict[str, Any]:
    """Those beside the MLP of each block, if any; transformers balances them by no loss."""
    if not reader.flag("enable_moe_block"):
        return {}
    return {
        "ffn": reader.count("moe_intermediate_size"),
        "shared_ffn": reader.count("intermediate_size"),
        "experts": reader.count("num_experts"),
        "experts_per_token": reader.count("top_k_experts"),
        "expert_norms": "each",
        "routing": {"score_scale": reader.count("hidden_size") ** -0.5, "expert_scales": True},
    }


def _read_heads(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Those of global blocks, or of all where all are global; empty: as those of others.

    Published files name them by keys of their own, newer ones of transformers by block.
    """
    keys_as_values = reader.flag("attention_k_eq_v")
    heads = {"head_dim": reader.count("head_dim"), "kv_heads": fields["kv_heads"]}
    if reader.mapping("per_layer_config"):
        far = heads | _by_block(reader, fields)
    else:
        number = reader.optional_count("num_global_key_value_heads") if keys_as_values else None
        far = {
            "head_dim": reader.count("global_head_dim"),
            "kv_heads": number or heads["kv_heads"],
        }
    if "attention_pattern" not in fields:
        return far | {"keys_as_values": keys_as_values}
    if far == heads and not keys_as_values:
        return {}
    return {"global_heads": far | {"keys_as_values": keys_as_values}}


def _by_block(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Heads of global blocks by `per_layer_config`, which has the same for each of them."""
    names = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
    found = dict(reader.mapping("per_layer_config"))
    pattern = tuple(fields.get("attention_pattern", ()))
    local = expanded(pattern, fields["layers"]) or (False,) * fields["layers"]
    wanted = {block for block, one in enumerate(local) if not one}
    blocks = {int(key) if str(key).isdecimal() else -1 for key in found}  # "05" in some files
    first = next(iter(found.values()))
    alike = all(one == first for one in found.values()) and isinstance(first, dict)
    if blocks != wanted or not alike or not {*first} <= {*names}:
        reader.refuse(
            "per_layer_config", f"the same {' and '.join(names)} for each full_attention block"
        )
    return {names[key]: value for key, value in first.items()}


def _write(model: ModelSpec) -> dict[str, Any]:
    far = model.global_heads or model
    config = write_gemma(model, "gemma4_text", "Gemma4ForCausalLM") | {
        "layer_types": write_layer_types(model),
        "global_head_dim": far.head_dim,
        "num_global_key_value_heads": far.kv_heads,
        "attention_k_eq_v": far.keys_as_values,
        "final_logit_softcapping": model.logit_cap,
        "hidden_size_per_layer_input": model.block_inputs.width if model.block_inputs else 0,
        "vocab_size_per_layer_input": model.vocab,
    }
    if (sharing := model.key_sharing) is not None:
        config["num_kv_shared_layers"] = sharing.blocks
        config["use_double_wide_mlp"] = sharing.ffn == 2 * model.ffn
    if model.sliding_window is not None:
        config["sliding_window"] = model.sliding_window
    if model.experts:
        config |= {
            "enable_moe_block": True,
            "intermediate_size": model.shared_ffn,
            "moe_intermediate_size": model.ffn,
            "num_experts": model.experts,
            "top_k_experts": model.experts_per_token,
        }
    return write_ropes(config, model)


_WITHIN = "model.layers.{}"
_FIRST = ("experts.gate_proj", "experts.up_proj")
_NAMES = {
    **AROUND_TENSORS.names,
    BLOCK_SCALE: f"{_WITHIN}.layer_scalar",
    TABLES: "model.embed_tokens_per_layer.weight",
    TO_INPUTS: "model.per_layer_model_projection",
    INPUTS_NORM: "model.per_layer_projection_norm",
    OWN_GATE: f"{_WITHIN}.per_layer_input_gate",
    OWN_DOWN: f"{_WITHIN}.per_layer_projection",
    "own_closing_norm": f"{_WITHIN}.post_per_layer_input_norm",
    **{f"shared.{name}": f"{_WITHIN}.mlp.{name}" for name in DENSE},
    "shared_closing_norm": f"{_WITHIN}.post_feedforward_layernorm_1",
    "expert_norm": f"{_WITHIN}.pre_feedforward_layernorm_2",
    "expert_closing_norm": f"{_WITHIN}.post_feedforward_layernorm_2",
    "router_norm.weight": f"{_WITHIN}.router.scale",
    "router": f"{_WITHIN}.router.proj",
    EXPERT_SCALES: f"{_WITHIN}.router.per_expert_scale",
    **{f"{name}.weight": f"{_WITHIN}.experts.gate_up_proj" for name in _FIRST},
    "experts.down_proj.weight": f"{_WITHIN}.experts.down_proj",
}


def _write_unified(model: ModelSpec) -> dict[str, Any]:
    named = {"model_type": "gemma4_unified_text", "architectures": ["Gemma4UnifiedForCausalLM"]}
    return _write(model) | named


GEMMA4 = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | {
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
    _write,
    replace(
        AROUND_TENSORS,
        names=_NAMES,
        fused=(_FIRST,),
        transposed=("experts.down_proj.weight",),
    ),
    LLAMA_KEYS
    | {
        "logit_cap": ("final_logit_softcapping",),
        "attention_pattern": ("layer_types",),
        "keys_as_values": ("attention_k_eq_v",),
        "ffn": ("moe_intermediate_size", "intermediate_size"),
        "shared_ffn": ("intermediate_size",),
        "experts": ("num_experts",),
        "experts_per_token": ("top_k_experts",),
        "expert_norms": ("enable_moe_block",),
        "block_inputs": ("hidden_size_per_layer_input",),
        "key_sharing": ("num_kv_shared_layers",),
        "global_heads.head_dim": ("global_head_dim", "per_layer_config"),
        "global_heads.kv_heads": ("num_global_key_value_heads", "per_layer_config"),
    },
)
# The text model of Gemma 4 12B, whose files have no tower but read pictures and sound all the same.
GEMMA4_UNIFIED = replace(
    GEMMA4,
    defaults={
        **GEMMA4.defaults,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0,
    },
    write=_write_unified,
)
