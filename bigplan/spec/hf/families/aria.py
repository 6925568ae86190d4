"""The text model of Aria: a Llama whose MLPs are experts, beside some that all tokens pass."""

from __future__ import annotations

from bigplan.spec.hf.families.experts import DENSE, FIRST, shared_names, stacked_names
from bigplan.spec.hf.families.llama import LLAMA
from bigplan.spec.hf.families.parts import Part, counts, off, written

_SHARED = Part(
    lambda reader: {
        "shared_ffn": reader.count("intermediate_size") * reader.count("moe_num_shared_experts")
    },
    lambda model: {"moe_num_shared_experts": model.shared_ffn // max(1, model.ffn)},
    {"shared_ffn": ("moe_num_shared_experts",)},
)
_MLP = "model.layers.{}.mlp"
ARIA_TEXT = LLAMA.like(
    "aria_text",
    "AriaTextForCausalLM",
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "moe_num_experts": 8,
        "moe_topk": 2,
        "moe_num_shared_experts": 2,
    },
    off("mlp_bias"),
    counts(experts="moe_num_experts", experts_per_token="moe_topk"),
    _SHARED,
    written({"pad_token_id": None}),
    tensors=LLAMA.tensors.but(
        {
            **shared_names(f"{_MLP}.shared_experts"),
            "router": f"{_MLP}.router",
            **stacked_names(f"{_MLP}.experts.fc1.weight", f"{_MLP}.experts.fc2.weight"),
        },
        without=DENSE,
        # Files have one matrix [in, out] of each expert, gate beside up.
        transposed=tuple(f"{name}.weight" for name in FIRST),
        fused=(FIRST,),
    ),
)
