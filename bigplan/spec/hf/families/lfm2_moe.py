"""LFM2 with experts behind routers by sigmoids in all but the first blocks (LFM2-8B-A1B)."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.dense_blocks import dense_fields, first_ones
from bigplan.spec.hf.families.experts import DENSE
from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.families.lfm2 import LFM2, MIXER_KEYS, read_mixers, write_mixers
from bigplan.spec.hf.families.llama import LLAMA_KEYS, read_llama_like, write_llama_like
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import ROUTER_BIAS
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    tied = "tie_embedding" if "tie_embedding" in reader.config else "tie_word_embeddings"
    dense = reader.optional_count("num_dense_layers", least=0) or 0
    return (
        read_llama_like(reader)
        | read_mixers(reader)
        | {
            "ffn": reader.count("moe_intermediate_size"),
            "experts": reader.count("num_experts"),
            "experts_per_token": reader.count("num_experts_per_tok"),
            "router_normalised": reader.flag("norm_topk_prob"),
            **dense_fields(reader, first_ones(dense, reader.count("num_hidden_layers"))),
            "routing": {
                "scores": "sigmoid",
                "bias": reader.flag("use_expert_bias"),
                "scale": reader.get("routed_scaling_factor"),
            },
            "norm_epsilon": reader.get("norm_eps"),
            "qk_norm": True,
            "tied_embeddings": reader.flag(tied),
        }
    )


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "lfm2_moe", "Lfm2MoeForCausalLM")
    del config["rms_norm_eps"], config["hidden_act"], config["attention_dropout"]
    return (
        config
        | write_mixers(model)
        | {
            "intermediate_size": model.dense_ffn or model.ffn,
            "moe_intermediate_size": model.ffn,
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "norm_topk_prob": model.router_normalised,
            "num_dense_layers": model.dense_blocks,
            "use_expert_bias": model.routed_by.bias,
            "routed_scaling_factor": model.routed_by.scale,
            "norm_eps": model.norm_epsilon,
            **NO_TOKENS,
        }
    )


_WITHIN = "model.layers.{}.feed_forward"
_EXPERTS = {
    f"experts.{ours}": f"{_WITHIN}.experts.{{expert}}.{theirs}"
    for ours, theirs in zip(DENSE, ("w1", "w3", "w2"), strict=True)
}
LFM2_MOE = ModelFamily(
    _read,
    {
        **LFM2.defaults,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "num_experts": 32,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    _write,
    Tensors(
        {
            **LFM2.tensors.names,
            "router": f"{_WITHIN}.gate",
            ROUTER_BIAS: f"{_WITHIN}.expert_bias",
            **_EXPERTS,
        },
        fused=LFM2.tensors.fused,
    ),
    LLAMA_KEYS
    | MIXER_KEYS
    | {
        "experts": ("num_experts",),
        "experts_per_token": ("num_experts_per_tok",),
        "ffn": ("moe_intermediate_size",),
        "router_normalised": ("norm_topk_prob",),
        "dense_blocks": ("num_dense_layers",),
        "dense_ffn": ("intermediate_size",),
        "routing.bias": ("use_expert_bias",),
        "routing.scale": ("routed_scaling_factor",),
        "tied_embeddings": ("tie_embedding", "tie_word_embeddings"),
    },
)
