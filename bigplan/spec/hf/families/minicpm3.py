"""MiniCPM 3: latent attention whose rope turns halves, and factors as Granite has them."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.parts import Part, numbers, written
from bigplan.spec.hf.families.youtu import YOUTU
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read_factors(reader: ConfigReader) -> dict[str, Any]:
    """Residuals' factor is by the depth, that of logits by the width; null is a factor of 1."""
    hidden, layers = reader.count("hidden_size"), reader.count("num_hidden_layers")
    depth = None if reader.get("scale_depth") is None else reader.number("scale_depth")
    return {
        "residual_scale": 1.0 if depth is None else depth / sqrt(layers),
        "logit_scale": (reader.optional_count("dim_model_base") or hidden) / hidden,
    }


def _write_factors(model: ModelSpec) -> dict[str, Any]:
    return {
        "scale_depth": model.residual_scale * sqrt(model.layers),
        "dim_model_base": round(model.logit_scale * model.hidden),
    }


_KEYS = {"residual_scale": ("scale_depth",), "logit_scale": ("dim_model_base",)}
_MINICPM3 = YOUTU.like(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    {
        "vocab_size": 73448,
        "hidden_size": 2560,
        "intermediate_size": 6400,
        "num_hidden_layers": 62,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": None,
        "mlp_bias": False,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
    numbers(embedding_scale="scale_emb"),
    Part(_read_factors, _write_factors, _KEYS),
    written({"mlp_bias": False, **NO_TOKENS}),
    without=("rope_interleave",),
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    if reader.flag("mlp_bias"):
        reader.refuse("mlp_bias", "false")
    usual = reader.count("hidden_size") // reader.count("num_attention_heads")
    widths = {"rope_interleave": False, "v_head_dim": reader.get("v_head_dim") or usual}
    return _MINICPM3.read(reader.saying(widths))


MINICPM3 = replace(_MINICPM3, read=_read)
