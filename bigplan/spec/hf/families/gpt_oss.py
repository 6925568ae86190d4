"""GPT-OSS: attention with sinks, and experts with biases whose activation is clamped."""

from __future__ import annotations

from typing import Any

from bigplan.spec.clamped import ALPHA, LIMIT
from bigplan.spec.hf.families.experts import (
    DENSE,
    FIRST,
    LAST,
    LOCAL_EXPERTS,
    ROUTER,
    stacked_names,
)
from bigplan.spec.hf.families.layer_types import layer_types
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, LLAMA_TENSORS
from bigplan.spec.hf.families.parts import Part, always, written
from bigplan.spec.hf.families.rope import write_scaling
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import SINKS
from bigplan.spec.model import ModelSpec

_CONSTANTS = {"swiglu_alpha": ALPHA, "swiglu_limit": LIMIT}


_WINDOW = 128


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Transformers adds the router's loss only where it gives the router's scores."""
    for key, usual in _CONSTANTS.items():
        if reader.number(key) != usual:
            reader.refuse(key, f"{usual:g}")
    balanced = reader.flag("output_router_logits")
    return {} if balanced else {"router_loss": 0.0}


def _write(model: ModelSpec) -> dict[str, Any]:
    """Transformers wants a window even if no block has it, and scales angles if none is told."""
    return {
        "sliding_window": model.sliding_window or _WINDOW,
        "rope_scaling": write_scaling(model.rope_scaling) or {"rope_type": "default"},
    }


_MLP = "model.layers.{}.mlp"
_NAMES = {
    SINKS: "model.layers.{}.self_attn.sinks",
    "router": f"{_MLP}.router",
    "router_scores": f"{_MLP}.router",
    **stacked_names(f"{_MLP}.experts.gate_up_proj", f"{_MLP}.experts.down_proj"),
    **stacked_names(f"{_MLP}.experts.gate_up_proj_bias", f"{_MLP}.experts.down_proj_bias", "bias"),
}
# Files have one matrix [in, out] of each expert, and a row of biases; gate and up take turns.
_BIASES = tuple(f"{name}.bias" for name in (*FIRST, LAST))
_TENSORS = LLAMA_TENSORS.but(
    _NAMES,
    without=DENSE,
    transposed=(*(f"{name}.weight" for name in FIRST), *_BIASES),
    fused=(FIRST,),
    in_turns=FIRST,
)
GPT_OSS = LLAMA_LIKE.like(
    "gpt_oss",
    "GptOssForCausalLM",
    {
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "sliding_window": _WINDOW,
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
    },
    layer_types(lambda reader, block: block % 2 == 0),
    LOCAL_EXPERTS,
    ROUTER,
    # Published files have both keys.
    Part(_read, _write, {"experts_per_token": ("num_experts_per_tok", "experts_per_token")}),
    always(routing={"score_bias": True}, mlp="clamped_swiglu", mlp_bias=True, attention_sinks=True),
    ATTENTION_BIAS,
    written(_CONSTANTS),
    tensors=_TENSORS,
)
