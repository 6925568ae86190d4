"""Mellum 2: a Qwen3-MoE some of whose blocks have a window and a base of rope of their own.

Layers that predict further tokens (`num_mtp_layers`) are left out, as transformers does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.dense_blocks import by_types, dense_fields, first_ones, write_types
from bigplan.spec.hf.families.experts import QWEN3_MOE
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.layer_types import (
    read_layer_types,
    read_ropes,
    write_layer_types,
    write_ropes,
)
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec

_BASE = 10000.0  # of blocks with a window, where a file does not tell it


def _read(reader: ConfigReader) -> dict[str, Any]:
    """What Qwen3-MoE's keys say of windows and dense blocks, other keys say here."""
    usual = {"use_sliding_window": False, "mlp_only_layers": None, "decoder_sparse_step": 1}
    fields = QWEN3_MOE.read(replace(reader, config={**reader.config, **usual}))
    fields |= dense_fields(reader, by_types(reader, first_ones(0, fields["layers"])))
    fields |= read_layer_types(reader, [False] * fields["layers"])
    return read_ropes(reader, fields, _BASE)


def _write(model: ModelSpec) -> dict[str, Any]:
    other = ("use_sliding_window", "mlp_only_layers", "decoder_sparse_step")
    config = {key: value for key, value in QWEN3_MOE.write(model).items() if key not in other}
    return write_ropes(config, model) | {
        "model_type": "mellum",
        "architectures": ["MellumForCausalLM"],
        "layer_types": write_layer_types(model),
        "mlp_layer_types": write_types(model),
    }


MELLUM = ModelFamily(
    _read,
    {
        **QWEN3_MOE.defaults,
        "vocab_size": 98304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "moe_intermediate_size": 896,
        "num_hidden_layers": 28,
        "num_attention_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "num_experts": 64,
        "norm_topk_prob": True,
        "mlp_layer_types": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": _BASE},
        },
    },
    _write,
    QWEN3_MOE.tensors,
    {
        **QWEN3_MOE.keys,
        "attention_pattern": ("layer_types",),
        "dense_blocks": ("mlp_layer_types",),
        "expert_pattern": ("mlp_layer_types",),
    },
)
