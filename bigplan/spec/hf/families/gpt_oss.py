"""GPT-OSS: attention with sinks, and experts with biases whose activation is clamped."""

from __future__ import annotations

from typing import Any

from bigplan.spec.clamped import ALPHA, LIMIT
from bigplan.spec.hf.families.experts import DENSE, ROUTER_KEYS
from bigplan.spec.hf.families.family import ModelFamily, Tensors
from bigplan.spec.hf.families.layer_types import read_layer_types, write_layer_types
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_TENSORS,
    read_attention_bias,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.families.rope import write_scaling
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import SINKS
from bigplan.spec.model import ModelSpec

_CONSTANTS = {"swiglu_alpha": ALPHA, "swiglu_limit": LIMIT}


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Transformers adds the router's loss only where it gives the router's scores."""
    for key, usual in _CONSTANTS.items():
        if reader.number(key) != usual:
            reader.refuse(key, f"{usual:g}")
    blocks = range(reader.count("num_hidden_layers"))
    balanced = reader.flag("output_router_logits")
    fields = read_llama_like(reader) | read_layer_types(reader, [n % 2 == 0 for n in blocks])
    return fields | {
        "experts": reader.count("num_local_experts"),
        "experts_per_token": reader.count("num_experts_per_tok"),
        "router_loss": reader.get("router_aux_loss_coef") if balanced else 0.0,
        "routing": {"score_bias": True},
        "mlp": "clamped_swiglu",
        "mlp_bias": True,
        "attention_sinks": True,
        **read_attention_bias(reader),
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    """Transformers wants a window even if no block has it, and scales angles if none is told."""
    return (
        write_llama_like(model, "gpt_oss", "GptOssForCausalLM")
        | _CONSTANTS
        | {
            "num_local_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "router_aux_loss_coef": model.router_loss,
            "output_router_logits": model.router_loss > 0,
            "sliding_window": model.sliding_window or _DEFAULTS["sliding_window"],
            "rope_scaling": write_scaling(model.rope_scaling) or {"rope_type": "default"},
            "layer_types": write_layer_types(model),
            "attention_bias": model.qkv_bias,
        }
    )


_MLP = "model.layers.{}.mlp"
_FIRST = ("experts.gate_proj", "experts.up_proj")
_DOWN = "experts.down_proj"
_NAMES = {name: there for name, there in LLAMA_TENSORS.names.items() if name not in DENSE} | {
    SINKS: "model.layers.{}.self_attn.sinks",
    "router": f"{_MLP}.router",
    "router_scores": f"{_MLP}.router",
    **{f"{name}.weight": f"{_MLP}.experts.gate_up_proj" for name in _FIRST},
    **{f"{name}.bias": f"{_MLP}.experts.gate_up_proj_bias" for name in _FIRST},
    f"{_DOWN}.weight": f"{_MLP}.experts.down_proj",
    f"{_DOWN}.bias": f"{_MLP}.experts.down_proj_bias",
}
# Files have one matrix [in, out] of each expert, and a row of biases; gate and up take turns.
_BIASES = tuple(f"{name}.bias" for name in (*_FIRST, _DOWN))
_TENSORS = Tensors(
    _NAMES,
    transposed=(*(f"{name}.weight" for name in _FIRST), *_BIASES),
    fused=(_FIRST,),
    in_turns=_FIRST,
)
_DEFAULTS = LLAMA_DEFAULTS | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "num_experts_per_tok": 4,
    "router_aux_loss_coef": 0.001,
    "attention_bias": True,
    **_CONSTANTS,
}
GPT_OSS = ModelFamily(
    _read,
    _DEFAULTS,
    _write,
    _TENSORS,
    ROUTER_KEYS
    | {
        "experts": ("num_local_experts",),
        # Published files have both.
        "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
        "attention_pattern": ("layer_types",),
    },
)
