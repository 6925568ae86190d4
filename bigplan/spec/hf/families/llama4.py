"""The text of Llama 4: experts whose inputs are weighed, chunks of attention, some blocks plain.

Blocks with rope attend within chunks and norm what rope turned. The others see all tokens, and
their queries grow with their position.
"""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.dense_blocks import dense_fields
from bigplan.spec.hf.families.experts import (
    DENSE,
    FIRST,
    LOCAL_EXPERTS,
    shared_names,
    stacked_names,
)
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.layer_types import kinds_of_blocks, turned_blocks, write_turned
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, LLAMA_TENSORS
from bigplan.spec.hf.families.parts import Part, always, counts, optional_counts, written
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import compact

_KINDS = {"chunked_attention": True, "full_attention": False}


def _read(reader: ConfigReader) -> dict[str, Any]:
    fields = _read_experts(reader)
    if reader.flag("use_qk_norm"):
        fields |= {"qk_norm": True, "qk_norm_turned": True, "weightless_norms": "heads"}
    turned = turned_blocks(reader)
    if (kinds_of_blocks(reader, _KINDS, len(turned)) or turned) != turned:
        reader.refuse("layer_types", "chunked_attention where `no_rope_layers` has 1")
    if all(turned):
        return fields
    fields |= {"attention_pattern": compact(turned), "global_rope": False}
    if reader.get("attn_temperature_tuning"):  # published files have a number, whose value is true
        growth = {"factor": reader.get("attn_scale"), "length": int(reader.number("floor_scale"))}
        fields["global_query_growth"] = growth
    return fields


def _read_experts(reader: ConfigReader) -> dict[str, Any]:
    """All blocks have them, or those that `moe_layers` names, or each so-many-th one."""
    blocks, each = reader.count("num_hidden_layers"), reader.count("intermediate_size")
    routed = reader.places("moe_layers", blocks)
    if reader.get("moe_layers") is None:
        every = reader.count("interleave_moe_layer_step")
        routed = list(range(every - 1, blocks, every))
    if not routed:
        reader.refuse("moe_layers", "numbers of blocks with experts, one at least")
    dense = [block not in routed for block in range(blocks)]
    return {"shared_ffn": each, **dense_fields(reader, dense, "intermediate_size_mlp")}


def _write(model: ModelSpec) -> dict[str, Any]:
    growth = model.global_query_growth
    grown = {} if growth is None else {"attn_scale": growth.factor, "floor_scale": growth.length}
    return {
        "intermediate_size_mlp": model.dense_ffn or model.ffn,
        "moe_layers": [block for block, dense in enumerate(model.dense) if not dense],
        "use_qk_norm": model.qk_norm,
        "no_rope_layers": write_turned(model),
        "attn_temperature_tuning": growth is not None,
        **grown,
    }


_KEYS = {
    "expert_pattern": ("moe_layers", "interleave_moe_layer_step"),
    "dense_ffn": ("intermediate_size_mlp",),
    "attention_pattern": ("no_rope_layers",),
    "qk_norm": ("use_qk_norm",),
    "global_query_growth.factor": ("attn_scale",),
    "global_query_growth.length": ("floor_scale",),
}
_WITHIN = "model.layers.{}.feed_forward"
LLAMA4 = LLAMA_LIKE.like(
    "llama4_text",
    "Llama4ForCausalLM",
    {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "router_aux_loss_coef": 0.001,  # which no loss of transformers reads
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    ATTENTION_BIAS,
    optional_counts(attention_chunk="attention_chunk_size"),
    LOCAL_EXPERTS,
    counts(experts_per_token="num_experts_per_tok"),
    always(router_normalised=False, routing={"scores": "sigmoid", "weighs": "inputs"}),
    Part(_read, _write, _KEYS),
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but(
        {
            **{name: f"{_WITHIN}.{name}" for name in DENSE},
            **shared_names(f"{_WITHIN}.shared_expert"),
            "router": f"{_WITHIN}.router",
            **stacked_names(f"{_WITHIN}.experts.gate_up_proj", f"{_WITHIN}.experts.down_proj"),
        },
        transposed=tuple(f"{name}.weight" for name in FIRST),
        fused=(FIRST,),
        paired=("q_proj", "k_proj"),
    ),
)
