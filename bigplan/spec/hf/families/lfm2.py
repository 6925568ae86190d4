"""LFM2: most blocks have a gated short convolution in place of attention."""

from __future__ import annotations

from typing import Any

from bigplan.spec.convolution_steps import AFTER, BEFORE, VALUE
from bigplan.spec.hf.families.experts import DENSE
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.layer_types import kinds_of_blocks
from bigplan.spec.hf.families.llama import LLAMA_LIKE, LLAMA_TENSORS, OF_RMSNORM
from bigplan.spec.hf.families.mixers import attention_at, mixer_fields
from bigplan.spec.hf.families.parts import Part, always, values, written
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import ATTENTION, CONVOLUTION, OUTPUTS, ShortConvolution
from bigplan.spec.model import ModelSpec

_WORDS = {"full_attention": ATTENTION, "conv": CONVOLUTION}
_PATTERNS = ("layer_types", "full_attn_idxs")
_TYPES = {mixer: word for word, mixer in _WORDS.items()}


def _read_convolution(reader: ConfigReader) -> dict[str, Any]:
    return {"taps": reader.count("conv_L_cache"), "bias": reader.flag("conv_bias")}


def _write_convolution(model: ModelSpec) -> dict[str, Any]:
    conv = model.convolution or ShortConvolution()
    return {"conv_L_cache": conv.taps, "conv_bias": conv.bias}


CONVOLUTIONS = Part(
    _read_convolution,
    _write_convolution,
    {"convolution.taps": ("conv_L_cache",), "convolution.bias": ("conv_bias",)},
)


def _read_mixers(reader: ConfigReader) -> dict[str, Any]:
    """Which blocks have attention, by `layer_types` or else `full_attn_idxs`, and the others."""
    mixers = kinds_of_blocks(reader, _WORDS, reader.count("num_hidden_layers"))
    if not mixers and reader.get("full_attn_idxs") is not None:
        mixers = attention_at(reader, "full_attn_idxs", CONVOLUTION)
    return mixer_fields(mixers, CONVOLUTION, lambda: CONVOLUTIONS.read(reader))


def _write_mixers(model: ModelSpec) -> dict[str, Any]:
    types = [_TYPES.get(mixer, "full_attention") for mixer in model.mixers]
    return CONVOLUTIONS.write(model) | {"layer_types": types}


def _inner_width(reader: ConfigReader) -> dict[str, Any]:
    """Columns of the MLP: as told, or two thirds of that in whole multiples."""
    key = "intermediate_size" if reader.optional_count("block_ff_dim") is None else "block_ff_dim"
    width = reader.count(key)
    if not reader.flag("block_auto_adjust_ff_dim"):
        return {"ffn": width}
    multiple = reader.count("block_multiple_of")
    scale = min(reader.number("block_ffn_dim_multiplier"), 1e6)  # no model has as wide a one
    width = int(scale * int(2 * width / 3))
    return {"ffn": -(-width // multiple) * multiple}


def _read_tied(reader: ConfigReader) -> dict[str, Any]:
    """By either of two names; the second is written."""
    tied = "tie_embedding" if "tie_embedding" in reader.config else "tie_word_embeddings"
    return {"tied_embeddings": reader.flag(tied)}


_WITHIN = "model.layers.{}"
_MIXERS = {
    "input_norm": f"{_WITHIN}.operator_norm",
    "o_proj": f"{_WITHIN}.self_attn.out_proj",
    "q_norm": f"{_WITHIN}.self_attn.q_layernorm",
    "k_norm": f"{_WITHIN}.self_attn.k_layernorm",
    "conv": f"{_WITHIN}.conv.conv",
    **dict.fromkeys((BEFORE, AFTER, VALUE), f"{_WITHIN}.conv.in_proj"),
    OUTPUTS[CONVOLUTION]: f"{_WITHIN}.conv.out_proj",
    "post_norm": f"{_WITHIN}.ffn_norm",
    "norm": "model.embedding_norm",
}
# With experts, too, but for the MLP.
LFM2_LIKE = LLAMA_LIKE.like(
    "lfm2",
    "Lfm2ForCausalLM",
    {
        "vocab_size": 65536,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": None,
    },
    Part(_read_mixers, _write_mixers, {**CONVOLUTIONS.keys, "mixer_pattern": _PATTERNS}),
    Part(_read_tied, keys={"tied_embeddings": ("tie_embedding", "tie_word_embeddings")}),
    values(norm_epsilon="norm_eps"),
    always(qk_norm=True),
    written(NO_TOKENS),
    tensors=LLAMA_TENSORS.but(_MIXERS, fused=((BEFORE, AFTER, VALUE),)),
    without=(*OF_RMSNORM, "hidden_act", "attention_dropout"),
)
LFM2 = LFM2_LIKE.like(
    "lfm2",
    "Lfm2ForCausalLM",
    {},
    Part(_inner_width, keys={"ffn": ("block_ff_dim", "intermediate_size")}),
    written({"block_auto_adjust_ff_dim": False}),
    tensors=LFM2_LIKE.tensors.but(
        {
            name: f"{_WITHIN}.feed_forward.{own}"
            for name, own in zip(DENSE, ("w1", "w3", "w2"), strict=True)
        }
    ),
)
