"""OLMo Hybrid: most blocks have a gated delta rule, others OLMo 3's attention, norms and all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigplan.spec.delta_rule_steps import DECAYS, FILTERS, GATES, KEYS, NORM, QUERIES, RATES, VALUES
from bigplan.spec.hf.families.family import NO_TOKENS
from bigplan.spec.hf.families.llama import ATTENTION_BIAS, LLAMA_LIKE, NORMS_AFTER
from bigplan.spec.hf.families.parts import Part, always, written
from bigplan.spec.hf.families.qwen3_next import CONVOLVED, MIXER_TENSORS, MIXERS
from bigplan.spec.hf.families.rope import BESIDE_PARAMETERS
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import DELTA_RULE, OUTPUTS
from bigplan.spec.model import ModelSpec

# As transformers' modules have them, whatever the file says of other norms.
_NORM_EPSILON = 1e-5
_SIGNED = "linear_allow_neg_eigval"


def _read_mixers(reader: ConfigReader) -> dict[str, Any]:
    mixers = MIXERS.read(reader)
    if not mixers.get("mixer_pattern"):
        reader.refuse("layer_types", "blocks of both kinds")
    mixers["delta_rule"] |= {
        "norm_epsilon": _NORM_EPSILON,
        "norms_before": True,
    }
    return mixers


def _write_mixers(model: ModelSpec) -> dict[str, Any]:
    rule = model.delta_rule
    return MIXERS.write(model) | {_SIGNED: rule is not None and rule.rate_scale > 1}


_LAYER = "model.layers.{}"
_WITHIN = f"{_LAYER}.linear_attn"
_PRODUCTS = {QUERIES: "q", KEYS: "k", VALUES: "v", GATES: "g", RATES: "b", DECAYS: "a"}
_TENSORS = NORMS_AFTER.but(
    {
        **{name: place for name, place in MIXER_TENSORS.items() if "q_gate" not in name},
        **{name: f"{_WITHIN}.{word}_proj" for name, word in _PRODUCTS.items()},
        **{
            name.removesuffix(".weight"): f"{_WITHIN}.{word}_conv1d"
            for name, word in zip(FILTERS, "qkv", strict=True)
        },
        NORM.removesuffix(".weight"): f"{_WITHIN}.o_norm",
        OUTPUTS[DELTA_RULE]: f"{_WITHIN}.o_proj",
        # Blocks with a rule have these norms, and others those after.
        "input_norm": f"{_LAYER}.attention_layer_norm",
        "post_norm": f"{_LAYER}.feedforward_layer_norm",
    }
)
# As transformers 5.23 writes what it has read: the filters of queries, keys and values below each
# other, cut into equal parts by the three names, and a norm of blocks with attention by a name of
# others.
_WRITTEN_AGAIN = _TENSORS.but(
    {
        **dict.fromkeys(CONVOLVED, f"{_WITHIN}.conv1d"),
        "attention_closing_norm": f"{_LAYER}.feedforward_layer_norm",
    },
    fused=(*_TENSORS.fused, CONVOLVED),
    in_parts={"conv1d": ("q_conv1d", "k_conv1d", "v_conv1d")},
)
_OLMO_HYBRID = LLAMA_LIKE.like(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    {
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "max_position_embeddings": 65536,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        _SIGNED: True,
    },
    Part(_read_mixers, _write_mixers, {**MIXERS.keys, "delta_rule.rate_scale": (_SIGNED,)}),
    ATTENTION_BIAS,
    always(norms="after", qk_norm=True, qk_norm_whole=True),
    written(NO_TOKENS),
    tensors=_TENSORS,
)


def _read(reader: ConfigReader) -> dict[str, Any]:
    rope = reader.mapping("rope_parameters")
    turned = not rope or None not in (rope.get("rope_type", ""), rope.get("rope_theta", 0))
    fields = _OLMO_HYBRID.read(_with_sizes(reader)) | {"global_rope": turned}
    fields["delta_rule"]["rate_scale"] = 2 if reader.flag(_SIGNED) else 1
    return fields | ({} if turned else {"rope_theta": 10000.0})


def _with_sizes(reader: ConfigReader) -> ConfigReader:
    """With the rule's sizes that a file may leave out or have as null, by those of attention."""
    config = {key: value for key, value in reader.config.items() if value is not None}
    told = replace(reader, config=config)
    heads = told.count("num_attention_heads")
    sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
    told = replace(told, defaults={**told.defaults, **sizes})
    width = int(0.75 * told.count("hidden_size") / told.count("linear_num_key_heads"))
    told = replace(told, defaults={**told.defaults, "linear_key_head_dim": width})
    values = 2 * told.count("linear_key_head_dim")
    return replace(told, defaults={**told.defaults, "linear_value_head_dim": values})


def _write(model: ModelSpec) -> dict[str, Any]:
    config = _OLMO_HYBRID.write(model)
    if model.global_rope:  # else the class's own base
        return config
    config = {key: value for key, value in config.items() if key not in BESIDE_PARAMETERS}
    return config | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


OLMO_HYBRID = replace(_OLMO_HYBRID, read=_read, write=_write, other_tensors=(_WRITTEN_AGAIN,))
