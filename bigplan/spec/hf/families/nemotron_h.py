"""Nemotron-H: a block is a state space, attention without positions, an MLP or experts alone."""

from __future__ import annotations

from typing import Any

from bigplan.spec.expert_steps import ROUTER_BIAS
from bigplan.spec.hf.families.dense_blocks import FIRST, dense_fields
from bigplan.spec.hf.families.family import NO_TOKENS, Tensors, family
from bigplan.spec.hf.families.llama import HEADS
from bigplan.spec.hf.families.mamba import (
    ALONE_FLAGS,
    MAMBA_FUSED,
    keys_of,
    mamba_names,
    read_alone,
    write_alone,
)
from bigplan.spec.hf.families.parts import Part, always, counts, empty, values, words, written
from bigplan.spec.hf.families.shared_experts import DEEPSEEK_EXPERTS, read_deepseek_experts
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.layers import NARROWING, WIDENING
from bigplan.spec.mixers import ATTENTION, MLP, STATE_SPACE, StateSpace
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import compact_words

_COUNTS = {
    "heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "groups": "n_groups",
    "state": "ssm_state_size",
    "taps": "conv_kernel",
}
_PATTERN, _TYPES = "hybrid_override_pattern", "layers_block_type"
# To this, transformers 5.23 raises time steps whatever `time_step_limit` says (0.001 unless told),
# and takes its logarithm. NVIDIA's own code goes by `time_step_limit`, as `_read` does.
_LEAST, _NO_LEAST = "time_step_min", 1e-9
_EXPERTS = "experts"  # of blocks, besides mixers and MLP
_LETTERS = {"M": STATE_SPACE, "*": ATTENTION, "-": MLP, "E": _EXPERTS}
_WORDS = {
    "mamba": STATE_SPACE,
    "linear_attention": STATE_SPACE,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": _EXPERTS,
}


def _read_blocks(reader: ConfigReader) -> list[str]:
    """What each block is: of transformers 5 a list of words, before a letter for each."""
    key = _TYPES if reader.get(_TYPES) is not None else _PATTERN
    words = _WORDS if key == _TYPES else _LETTERS
    told = reader.texts(key) if key == _TYPES else tuple(reader.text(key))
    if not told or any(word not in words for word in told):
        reader.refuse(key, f"{', '.join(words)} for each block")
    blocks = [words[word] for word in told]
    if ATTENTION not in blocks:
        reader.refuse(key, "attention in one block at least")
    return blocks


def _read(reader: ConfigReader) -> dict[str, Any]:
    """Which blocks have what, and its sizes."""
    blocks = _read_blocks(reader)
    fields: dict[str, Any] = {"ffn": 0}
    if _EXPERTS in blocks:
        if reader.flag("mlp_bias"):
            reader.refuse("mlp_bias", "false: experts have no biases")
        shared = reader.count("moe_shared_expert_intermediate_size")
        latent = reader.optional_count("moe_latent_size") or 0
        fields = read_deepseek_experts(reader)
        fields |= dense_fields(reader, [block == MLP for block in blocks])
        fields |= {"shared_ffn": shared, "expert_latent": latent}
    elif MLP in blocks:
        fields = {"ffn": reader.count("intermediate_size"), "mlp_bias": reader.flag("mlp_bias")}
    if STATE_SPACE in blocks:
        fields["state_space"] = read_alone(reader, _COUNTS)
    mixers = [MLP if block == _EXPERTS else block for block in blocks]
    pattern = compact_words(mixers) if len({*mixers}) > 1 else []
    return fields | {"layers": len(blocks), "mixer_pattern": pattern}


def _write(model: ModelSpec) -> dict[str, Any]:
    letters = {mixer: letter for letter, mixer in _LETTERS.items()}
    routed = letters | ({MLP: letters[_EXPERTS]} if model.experts else {})
    blocks = zip(model.mixers, model.dense, strict=True)
    space = model.state_space or StateSpace(heads=1, head_dim=model.hidden)
    return DEEPSEEK_EXPERTS.write(model) | {
        _PATTERN: "".join((letters if dense else routed).get(one, "*") for one, dense in blocks),
        "moe_shared_expert_intermediate_size": model.shared_ffn,
        "moe_latent_size": model.expert_latent or None,
        "mlp_bias": model.mlp_bias,
        **write_alone(space, _COUNTS),
        _LEAST: max(space.least_step, _NO_LEAST),
    }


_KEYS = {
    **DEEPSEEK_EXPERTS.keys,
    **keys_of(_COUNTS | ALONE_FLAGS),
    "mixer_pattern": (_TYPES, _PATTERN),
    "ffn": ("intermediate_size", "moe_intermediate_size"),
    "shared_ffn": ("moe_shared_expert_intermediate_size",),
    "expert_latent": ("moe_latent_size",),
    "mlp": ("mlp_hidden_act",),
}
_WITHIN = "model.layers.{}"
_MIXER = f"{_WITHIN}.mixer"
_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
_NEMOTRON_H = family(
    "nemotron_h",
    "NemotronHForCausalLM",
    {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "tie_word_embeddings": False,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "time_step_limit": None,
        _TYPES: None,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "moe_shared_expert_overlap": True,  # when they run, not what they do
        FIRST: 0,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    empty("attention_bias", "false: products of attention have no biases"),
    empty("tie_word_embeddings", "false: the head has a table of its own"),
    words("mlp_hidden_act", "relu2"),
    words("mamba_hidden_act", "silu"),
    HEADS,
    counts(
        hidden="hidden_size",
        head_dim="head_dim",
        vocab="vocab_size",
        max_sequence_length="max_position_embeddings",
    ),
    values(norm_epsilon="layer_norm_epsilon"),
    always(positions="none", mlp="relu2"),
    Part(_read, _write, _KEYS),
    written({"mlp_hidden_act": "relu2", "tie_word_embeddings": False, **NO_TOKENS}),
    tensors=Tensors(
        {
            "embed_tokens": "model.embeddings",
            "input_norm": f"{_WITHIN}.norm",
            "post_norm": f"{_WITHIN}.norm",
            **mamba_names(_MIXER),
            **{name: f"{_MIXER}.{name}" for name in _PRODUCTS},
            "router": f"{_MIXER}.gate",
            NARROWING: f"{_MIXER}.fc1_latent_proj",
            WIDENING: f"{_MIXER}.fc2_latent_proj",
            ROUTER_BIAS: f"{_MIXER}.gate.e_score_correction_bias",
            **{f"shared.{name}": f"{_MIXER}.shared_experts.{name}" for name in _PRODUCTS[4:]},
            **{f"experts.{name}": f"{_MIXER}.experts.{{expert}}.{name}" for name in _PRODUCTS[4:]},
            "norm": "model.norm_f",
            "lm_head": "lm_head",
        },
        fused=MAMBA_FUSED,
    ),
)
_NAMES = _NEMOTRON_H.tensors.names.items()
NEMOTRON_H = _NEMOTRON_H.published_as(
    _NEMOTRON_H.tensors.but({n: place.replace("model.", "backbone.", 1) for n, place in _NAMES})
)
