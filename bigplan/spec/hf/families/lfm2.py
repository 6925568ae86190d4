"""LFM2: most blocks have a gated short convolution in place of attention."""

from __future__ import annotations

from typing import Any

from bigplan.spec.convolution_steps import AFTER, BEFORE, VALUE
from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily, Tensors
from bigplan.spec.hf.families.layer_types import kinds_of_blocks
from bigplan.spec.hf.families.llama import (
    LLAMA_DEFAULTS,
    LLAMA_KEYS,
    LLAMA_TENSORS,
    read_llama_like,
    write_llama_like,
)
from bigplan.spec.hf.families.mixers import attention_at, mixer_fields
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import ATTENTION, CONVOLUTION, OUTPUTS, ShortConvolution
from bigplan.spec.model import ModelSpec

_WORDS = {"full_attention": ATTENTION, "conv": CONVOLUTION}
_TYPES = {mixer: word for word, mixer in _WORDS.items()}


def _read(reader: ConfigReader) -> dict[str, Any]:
    tied = "tie_embedding" if "tie_embedding" in reader.config else "tie_word_embeddings"
    return (
        read_llama_like(reader)
        | read_mixers(reader)
        | {
            "ffn": _inner_width(reader),
            "norm_epsilon": reader.get("norm_eps"),
            "qk_norm": True,
            "tied_embeddings": reader.flag(tied),
        }
    )


def read_mixers(reader: ConfigReader) -> dict[str, Any]:
    """Which blocks have attention, by `layer_types` or else `full_attn_idxs`, and the others."""
    mixers = kinds_of_blocks(reader, _WORDS, reader.count("num_hidden_layers"))
    if not mixers and reader.get("full_attn_idxs") is not None:
        mixers = attention_at(reader, "full_attn_idxs", CONVOLUTION)
    return mixer_fields(mixers, CONVOLUTION, lambda: _read_convolution(reader))


def _read_convolution(reader: ConfigReader) -> dict[str, Any]:
    return {"taps": reader.count("conv_L_cache"), "bias": reader.flag("conv_bias")}


def write_mixers(model: ModelSpec) -> dict[str, Any]:
    """The same."""
    conv = model.convolution or ShortConvolution()
    return {
        "layer_types": [_TYPES.get(mixer, "full_attention") for mixer in model.mixers],
        "conv_L_cache": conv.taps,
        "conv_bias": conv.bias,
    }


def _inner_width(reader: ConfigReader) -> int:
    """Columns of the MLP: as told, or two thirds of that in whole multiples."""
    key = "intermediate_size" if reader.optional_count("block_ff_dim") is None else "block_ff_dim"
    width = reader.count(key)
    if not reader.flag("block_auto_adjust_ff_dim"):
        return width
    multiple = reader.count("block_multiple_of")
    width = int(reader.number("block_ffn_dim_multiplier") * int(2 * width / 3))
    return -(-width // multiple) * multiple


def _write(model: ModelSpec) -> dict[str, Any]:
    config = write_llama_like(model, "lfm2", "Lfm2ForCausalLM")
    del config["rms_norm_eps"], config["hidden_act"], config["attention_dropout"]
    return (
        config
        | write_mixers(model)
        | {"norm_eps": model.norm_epsilon, "block_auto_adjust_ff_dim": False, **NO_TOKENS}
    )


_WITHIN = "model.layers.{}"
MIXER_TENSORS = {
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
MIXER_KEYS = {
    "convolution.taps": ("conv_L_cache",),
    "convolution.bias": ("conv_bias",),
    "mixer_pattern": ("layer_types", "full_attn_idxs"),
    "norm_epsilon": ("norm_eps",),
}
LFM2 = ModelFamily(
    _read,
    LLAMA_DEFAULTS
    | {
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
    _write,
    Tensors(
        {
            **LLAMA_TENSORS.names,
            **MIXER_TENSORS,
            "gate_proj": f"{_WITHIN}.feed_forward.w1",
            "up_proj": f"{_WITHIN}.feed_forward.w3",
            "down_proj": f"{_WITHIN}.feed_forward.w2",
        },
        fused=((BEFORE, AFTER, VALUE),),
    ),
    LLAMA_KEYS
    | MIXER_KEYS
    | {
        "ffn": ("block_ff_dim", "intermediate_size"),
        "tied_embeddings": ("tie_embedding", "tie_word_embeddings"),
    },
)
