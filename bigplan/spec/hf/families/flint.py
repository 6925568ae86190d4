"""Flint: sinks of attention, rope in blocks with a window alone, and experts beside a shared one.

Routers take sigmoids in fp32 and have no bias. transformers adds their loss where it is asked for
their scores alone (`output_router_logits`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.dense_blocks import DENSE_BLOCKS
from bigplan.spec.hf.families.experts import EACH, EXPERTS, NORMALISED
from bigplan.spec.hf.families.layer_types import layer_types, turned_by_windows
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE
from bigplan.spec.hf.families.parts import Part, always, counts
from bigplan.spec.hf.families.shared_experts import QWEN2_MOE
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import SINKS
from bigplan.spec.model import ModelSpec

_WINDOW = 513


def _slides(reader: ConfigReader, block: int) -> bool:
    return block > 1 and block % 4 != 1 and block != reader.count("num_hidden_layers") - 1


_WINDOWS = turned_by_windows(layer_types(_slides))


def _write_windows(model: ModelSpec) -> dict[str, Any]:
    return _WINDOWS.write(model) | {"sliding_window": model.sliding_window or _WINDOW}


def _read_dense(reader: ConfigReader) -> dict[str, Any]:
    if reader.get("mlp_only_layers") is None:
        reader = reader.saying({"mlp_only_layers": [0, 1]})
    return DENSE_BLOCKS.read(reader)


def _no_loss(reader: ConfigReader) -> dict[str, Any]:
    if reader.flag("output_router_logits") and reader.get("router_aux_loss_coef"):
        reader.refuse("router_aux_loss_coef", "0: a loss of routers balances a softmax")
    return {}


FLINT = LLAMA_LIKE.like(
    "flint",
    "FlintForCausalLM",
    {
        **QWEN2_MOE.defaults,
        "vocab_size": 150144,
        "intermediate_size": 6144,
        "num_hidden_layers": 49,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "sliding_window": _WINDOW,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "num_experts": 256,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0005,
        "output_router_logits": False,
    },
    Part(_no_loss),
    ATTENTION_BIAS,
    replace(DENSE_BLOCKS, read=_read_dense),
    replace(_WINDOWS, write=_write_windows),
    EACH,
    EXPERTS,
    NORMALISED,
    counts(experts_per_token="num_experts_per_tok", shared_ffn="shared_expert_intermediate_size"),
    always(qk_norm=True, attention_sinks=True, routing={"scores": "sigmoid"}),
    tensors=QWEN2_MOE.tensors.but({SINKS: "model.layers.{}.self_attn.softmax_offset"}),
)
