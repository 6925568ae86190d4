"""The text model of Aria: a Llama whose MLPs are experts, beside some that all tokens pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.hf.families.experts import DENSE
from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.llama import LLAMA, LLAMA_TENSORS
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.flag("mlp_bias"):
        reader.refuse("mlp_bias", "false")
    each = reader.count("intermediate_size")
    return LLAMA.read(reader) | {
        "experts": reader.count("moe_num_experts"),
        "experts_per_token": reader.count("moe_topk"),
        "shared_ffn": each * reader.count("moe_num_shared_experts"),
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    return LLAMA.write(model) | {
        "model_type": "aria_text",
        "architectures": ["AriaTextForCausalLM"],
        "moe_num_experts": model.experts,
        "moe_topk": model.experts_per_token,
        "moe_num_shared_experts": model.shared_ffn // max(1, model.ffn),
        "pad_token_id": None,
    }


_MLP = "model.layers.{}.mlp"
_FIRST = ("experts.gate_proj", "experts.up_proj")
_OTHERS = {name: place for name, place in LLAMA_TENSORS.names.items() if name not in DENSE}
ARIA_TEXT = ModelFamily(
    _read,
    {
        **LLAMA.defaults,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "moe_num_experts": 8,
        "moe_topk": 2,
        "moe_num_shared_experts": 2,
    },
    _write,
    replace(
        LLAMA_TENSORS,
        names={
            **_OTHERS,
            **{f"shared.{name}": f"{_MLP}.shared_experts.{name}" for name in DENSE},
            "router": f"{_MLP}.router",
            **{f"{name}.weight": f"{_MLP}.experts.fc1.weight" for name in _FIRST},
            "experts.down_proj.weight": f"{_MLP}.experts.fc2.weight",
        },
        # Files have one matrix [in, out] of each expert, gate beside up.
        transposed=tuple(f"{name}.weight" for name in _FIRST),
        fused=(_FIRST,),
    ),
    {
        **LLAMA.keys,
        "experts": ("moe_num_experts",),
        "experts_per_token": ("moe_topk",),
        "shared_ffn": ("moe_num_shared_experts",),
    },
)
