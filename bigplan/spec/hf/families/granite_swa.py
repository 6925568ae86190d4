"""Granite with sinks of attention and windows in most blocks, dense or with experts.

Each block has a base of rope of its own in its files, or none where rope turns nothing.
"""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.families.experts import DENSE, FIRST, stacked_names
from bigplan.spec.hf.families.granite import GRANITE
from bigplan.spec.hf.families.granite_moe import GRANITE_MOE_SHARED
from bigplan.spec.hf.families.layer_types import layer_types, write_layer_types
from bigplan.spec.hf.families.llama import LLAMA_TENSORS
from bigplan.spec.hf.families.parts import Part, always
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import SINKS
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import expanded

_BASES = "layer_rope_theta"
_WINDOW = 128


def _bases(reader: ConfigReader, windows: dict[str, Any], blocks: int) -> dict[str, Any]:
    """Rope's bases of blocks with a window and of others; 0: it turns nothing."""
    bases = reader.get(_BASES)
    if bases is None:
        return {}
    every = isinstance(bases, list) and len(bases) == blocks
    if not every or not all(isinstance(base, int | float) and base >= 0 for base in bases):
        reader.refuse(_BASES, "a number for each block, 0 where rope turns nothing")
    pattern = tuple(windows.get("attention_pattern", ()))
    local = expanded(pattern, blocks) or (windows["sliding_window"] is not None,) * blocks
    near, far = (
        {b for b, one in zip(bases, local, strict=True) if one == w} for w in (True, False)
    )
    if len(near) > 1 or len(far) > 1 or near == {0}:
        reader.refuse(
            _BASES, "one number for all blocks with a window, above 0, and one for others"
        )
    fields = {} if far != {0} else {"global_rope": False}
    turned = [base for base in (*far, *near) if base]
    if turned:
        fields["rope_theta"] = turned[0]
    if len({*turned}) > 1:
        if reader.mapping("rope_parameters").get("rope_type", "default") != "default":
            reader.refuse(_BASES, "one number where rope_type is not default")
        fields["local_rope_theta"] = turned[1]
    return fields


_LAYER_TYPES = layer_types(lambda reader, block: block % 4 > 0)


def _read(reader: ConfigReader) -> dict[str, Any]:
    windows = _LAYER_TYPES.read(reader)
    return windows | _bases(reader, windows, reader.count("num_hidden_layers"))


def _write(model: ModelSpec) -> dict[str, Any]:
    return {
        "sliding_window": model.sliding_window or _WINDOW,
        "layer_types": write_layer_types(model),
        _BASES: [one.rope_theta or 0 for one in model.attentions],
    }


_WINDOWS = Part(_read, _write, {**_LAYER_TYPES.keys, "local_rope_theta": (_BASES,)})
_OWN = {"sliding_window": _WINDOW, _BASES: None}
_BLOCK = "model.layers.{}"
_SINKS = {SINKS: f"{_BLOCK}.self_attn.sinks"}
_ROUTED = f"{_BLOCK}.block_sparse_moe"
_SHARED = ("shared.gate_proj", "shared.up_proj")
GRANITE_SWA = GRANITE.like(
    "granite_swa",
    "GraniteSWAForCausalLM",
    {
        **_OWN,
        "vocab_size": 100352,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    _WINDOWS,
    always(attention_sinks=True),
    tensors=LLAMA_TENSORS.but(_SINKS),
)
GRANITE_MOE_SWA = GRANITE_MOE_SHARED.like(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM",
    _OWN,
    _WINDOWS,
    always(attention_sinks=True),
    tensors=LLAMA_TENSORS.but(
        {
            **_SINKS,
            **dict.fromkeys(_SHARED, f"{_BLOCK}.shared_mlp.input_linear"),
            "shared.down_proj": f"{_BLOCK}.shared_mlp.output_linear",
            "router": f"{_ROUTED}.router",
            **stacked_names(f"{_ROUTED}.experts.gate_up_proj", f"{_ROUTED}.experts.down_proj"),
        },
        without=DENSE,
        fused=(FIRST, _SHARED),
        transposed=("experts.down_proj.weight",),
    ),
)
