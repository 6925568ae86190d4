"""MiniCPM 3: latent attention whose rope turns halves, and factors as Granite has them."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from bigplan.spec.hf.families.family import NO_TOKENS, ModelFamily
from bigplan.spec.hf.families.youtu import YOUTU
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Residuals' factor is by the depth, that of logits by the width; null is a factor of 1."""
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    widths = {"rope_interleave": False, "v_head_dim": reader.get("v_head_dim") or hidden // heads}
    if reader.flag("mlp_bias"):
        reader.refuse("mlp_bias", "false")
    fields = YOUTU.read(replace(reader, config={**reader.config, **widths}))
    depth = None if reader.get("scale_depth") is None else reader.number("scale_depth")
    return fields | {
        "embedding_scale": reader.number("scale_emb"),
        "residual_scale": 1.0 if depth is None else depth / sqrt(fields["layers"]),
        "logit_scale": (reader.optional_count("dim_model_base") or hidden) / hidden,
    }


def _write(model: ModelSpec) -> dict[str, Any]:
    config = YOUTU.write(model) | {
        "model_type": "minicpm3",
        "architectures": ["MiniCPM3ForCausalLM"],
        "scale_emb": model.embedding_scale,
        "scale_depth": model.residual_scale * sqrt(model.layers),
        "dim_model_base": round(model.logit_scale * model.hidden),
        "mlp_bias": False,
        **NO_TOKENS,
    }
    config.pop("rope_interleave", None)
    return config


MINICPM3 = ModelFamily(
    _read,
    {
        **YOUTU.defaults,
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
    _write,
    YOUTU.tensors,
    {
        **YOUTU.keys,
        "embedding_scale": ("scale_emb",),
        "residual_scale": ("scale_depth",),
        "logit_scale": ("dim_model_base",),
    },
)
