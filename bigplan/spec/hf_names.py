"""Which tensor of a Hugging Face model holds which of our parameters.

Hugging Face's rotary halves are ours, so most tensors are the same under another name. GPT-2 keeps
its matrices as [in, out], and queries, keys and values as one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.spec.model import ModelSpec
from bigplan.spec.step import Parameter

_LLAMA = {
    "embed_tokens": "model.embed_tokens",
    "input_norm": "model.layers.{}.input_layernorm",
    "q_proj": "model.layers.{}.self_attn.q_proj",
    "k_proj": "model.layers.{}.self_attn.k_proj",
    "v_proj": "model.layers.{}.self_attn.v_proj",
    "o_proj": "model.layers.{}.self_attn.o_proj",
    "q_norm": "model.layers.{}.self_attn.q_norm",
    "k_norm": "model.layers.{}.self_attn.k_norm",
    "post_norm": "model.layers.{}.post_attention_layernorm",
    "gate_proj": "model.layers.{}.mlp.gate_proj",
    "up_proj": "model.layers.{}.mlp.up_proj",
    "down_proj": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
_GPT2 = {
    "embed_tokens": "transformer.wte",
    "embed_positions": "transformer.wpe",
    "input_norm": "transformer.h.{}.ln_1",
    "q_proj": "transformer.h.{}.attn.c_attn",
    "k_proj": "transformer.h.{}.attn.c_attn",
    "v_proj": "transformer.h.{}.attn.c_attn",
    "o_proj": "transformer.h.{}.attn.c_proj",
    "post_norm": "transformer.h.{}.ln_2",
    "up_proj": "transformer.h.{}.mlp.c_fc",
    "down_proj": "transformer.h.{}.mlp.c_proj",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
_OPT = {
    "embed_tokens": "model.decoder.embed_tokens",
    "embed_positions": "model.decoder.embed_positions",
    "input_norm": "model.decoder.layers.{}.self_attn_layer_norm",
    "q_proj": "model.decoder.layers.{}.self_attn.q_proj",
    "k_proj": "model.decoder.layers.{}.self_attn.k_proj",
    "v_proj": "model.decoder.layers.{}.self_attn.v_proj",
    "o_proj": "model.decoder.layers.{}.self_attn.out_proj",
    "post_norm": "model.decoder.layers.{}.final_layer_norm",
    "up_proj": "model.decoder.layers.{}.fc1",
    "down_proj": "model.decoder.layers.{}.fc2",
    "norm": "model.decoder.final_layer_norm",
    "lm_head": "lm_head",
}
_NAMES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gpt2": _GPT2,
    "opt": _OPT,
}
WEIGHT_FAMILIES: tuple[str, ...] = tuple(_NAMES)  # model types whose weights are read and written


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter within a tensor: share `part` of `parts` of its rows, once it is [out, in]."""

    tensor: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter of a layer (its index in layer_sequence())."""

    layer: int
    parameter: Parameter


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor of a Hugging Face file: its pieces one below the other, then transposed or not."""

    name: str
    pieces: tuple[Piece, ...]
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """As the file has it."""
        rows = sum(piece.parameter.shape[0] for piece in self.pieces)
        shape = (rows, *self.pieces[0].parameter.shape[1:])
        return shape[::-1] if self.transposed else shape


def stored(family: str, layer: int, parameter: str) -> Stored:
    """Where `family`'s files hold our `parameter` ("q_proj.weight") of a layer."""
    name, _, part = parameter.rpartition(".")
    tensor = f"{_NAMES[family][name].format(layer - 1)}.{part}"
    transposed = family == "gpt2" and part == "weight" and name in _GPT2_LINEAR
    if family == "gpt2" and name in _FUSED:
        return Stored(tensor, transposed, _FUSED.index(name), len(_FUSED))
    return Stored(tensor, transposed)


_FUSED = ("q_proj", "k_proj", "v_proj")
_GPT2_LINEAR = (*_FUSED, "o_proj", "up_proj", "down_proj")


def hf_tensors(family: str, model: ModelSpec) -> tuple[HfTensor, ...]:
    """Every tensor of the model's files, layer by layer."""
    pieces: dict[tuple[str, bool], list[Piece]] = {}
    for layer, kind in enumerate(model.layer_sequence()):
        for parameter in model.kinds()[kind]:
            place = stored(family, layer, parameter.name)
            pieces.setdefault((place.tensor, place.transposed), []).append(Piece(layer, parameter))
    return tuple(
        HfTensor(name, tuple(parts), transposed) for (name, transposed), parts in pieces.items()
    )
