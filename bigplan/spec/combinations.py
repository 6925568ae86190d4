"""Which fields of a model may be together: those of its attention, positions and norms.

Those of experts are in experts.py, those of mixers in mixers.py. Each check takes an Architecture,
typed as Any because that module imports this one, and raises InputError.
"""

from __future__ import annotations

from typing import Any

from bigplan.errors import InputError
from bigplan.spec.mixers import MLP
from bigplan.spec.pattern import expanded


def check_attention(model: Any) -> None:
    """Local and global blocks, and sinks."""
    _check_pattern(model)
    _check_chunks(model)
    _check_sinks(model)
    _check_gate(model)


def check_positions(model: Any) -> None:
    """What is said of positions is of the kind that the model has."""
    if model.position_offset and model.positions != "learned":
        raise InputError(
            f"`position_offset` {model.position_offset} counts rows of a learned table, but "
            f"`positions` is {model.positions}; remove it, or use `positions: learned`"
        )
    if model.rope_scaling and model.positions != "rope":
        raise InputError(
            f"`rope_scaling` changes rotary angles, but `positions` is {model.positions}; remove it"
        )
    _check_scaling(model)
    if model.positions == "rope" and (model.rotary_width % 2 or not model.rotary_width):
        raise InputError(
            f"`head_dim` {model.head_dim} times `rotary_fraction` {model.rotary_fraction:g} is "
            f"{model.rotary_width} columns, but rope rotates pairs; use an even number of them"
        )


def _check_scaling(model: Any) -> None:
    """Longrope has a factor for each pair of columns; turned queries that grow are turned whole."""
    scaling = model.rope_scaling
    if scaling is None:
        return
    if scaling.query_growth and model.rotary_fraction != 1:
        raise InputError(
            "`rope_scaling` has a `query_growth` with `rotary_fraction`, but queries grow where "
            "rope turns all of their columns, or with latent attention; remove one"
        )
    if scaling.name != "longrope":
        return
    pairs = model.rotary_width // 2
    for key in ("short_factors", "long_factors"):
        if len(getattr(scaling, key)) != pairs:
            raise InputError(
                f"`rope_scaling` has {len(getattr(scaling, key))} `{key}`, but rope turns "
                f"{pairs} pairs of a head's columns; state one for each"
            )


def _check_pattern(model: Any) -> None:
    """Local and global blocks differ in something, and all of it is said."""
    local = expanded(model.attention_pattern, model.layers)
    own = {
        "sliding_window": model.sliding_window is not None,
        "attention_chunk": model.attention_chunk is not None,
        "local_rope_theta": model.local_rope_theta is not None,
        "global_rope": not model.global_rope,
    }
    if model.positions != "rope" and (own["local_rope_theta"] or own["global_rope"]):
        raise InputError(
            "`local_rope_theta` and `global_rope` are of rope, but `positions` is "
            f"{model.positions}; remove them"
        )
    if not local:  # without a window all blocks are global
        local_alone = own["sliding_window"] or own["attention_chunk"]
        keys = ("local_rope_theta", *(("global_rope",) if local_alone else ()))
        if needless := [f"`{key}`" for key in keys if own[key]]:
            raise InputError(
                f"{' and '.join(needless)} without `attention_pattern`, which says which "
                "blocks are local and which global; state it, or remove them"
            )
        return
    if len({run.partition(" ")[2] for run in model.attention_pattern}) == 1:
        raise InputError(
            f"`attention_pattern` {', '.join(model.attention_pattern)} makes all blocks alike; "
            "remove it"
        )
    if not any(own.values()):
        raise InputError(
            "`attention_pattern` without what local and global blocks differ in; state "
            "`sliding_window`, `attention_chunk`, `local_rope_theta` or `global_rope`, or remove it"
        )


def _check_gate(model: Any) -> None:
    """A gate of heads is a gate."""
    if model.gate_of_heads and not model.attention_gate:
        raise InputError(
            "`gate_of_heads` without `attention_gate`, which it says more of; state it, or remove "
            "this"
        )


def _check_chunks(model: Any) -> None:
    """Chunks of tokens, and queries that grow where no rope turns them."""
    unlike = {
        "`sliding_window`": model.sliding_window is not None,
        f"`positions: {model.positions}`": model.positions == "alibi",
        "`latent_attention`": model.latent_attention is not None,
    }
    found = [name for name, there in unlike.items() if there]
    if model.attention_chunk is not None and found:
        raise InputError(
            f"`attention_chunk` {model.attention_chunk} with {' and '.join(found)}, but attention "
            "within chunks is of plain heads and sees all before a token in its chunk; remove one"
        )
    if model.global_query_growth is not None and (
        model.global_rope or model.positions != "rope" or not model.attention_pattern
    ):
        raise InputError(
            "`global_query_growth` is of global blocks in which rope turns nothing; state "
            "`attention_pattern` and `global_rope: false`, or remove it"
        )


def _check_sinks(model: Any) -> None:
    """Kernels of some attention take no sinks."""
    unlike = {
        f"positions: {model.positions}": model.positions == "alibi",
        "score_cap": model.score_cap is not None,
        "latent_attention": model.latent_attention is not None,
    }
    found = [f"`{name}`" for name, there in unlike.items() if there]
    if model.attention_sinks and found:
        raise InputError(
            f"`attention_sinks` with {' and '.join(found)}, whose kernels take no sinks; remove one"
        )


def check_norms(model: Any) -> None:
    """Norms and factors stand where the model has what they are of."""
    beside = [key for key in ("parallel_residual",) if getattr(model, key)]
    if model.experts and model.residual_scale != 1:  # which is in experts' weights, before a norm
        beside.append("residual_scale")
    if (model.norms != "before" or model.expert_norms != "as_others") and beside:
        of = " of experts" if model.experts else ""
        key = "norms" if model.norms != "before" else "expert_norms"
        raise InputError(
            f"`{key}` {getattr(model, key)} with `{beside[0]}`{of}, whose norms stand before; "
            "change one"
        )
    alone = [key for key in ("parallel_residual", "shared_gate") if getattr(model, key)]
    if model.residual_scale != 1 and alone:
        raise InputError(
            f"`residual_scale` {model.residual_scale:g} with `{alone[0]}`, whose results are "
            "added as they are; remove one"
        )
    _check_mlp_factors(model)
    if model.head_bias and model.tied_embeddings:
        raise InputError("`head_bias` with `tied_embeddings`, which have none; remove one")
    if model.shared_norm and not model.parallel_residual:
        raise InputError(
            "`shared_norm` without `parallel_residual`: MLPs that come after attention have a "
            "norm of their own; state it, or remove `shared_norm`"
        )
    _check_weightless(model)
    if model.qk_norm_whole and not model.qk_norm:
        raise InputError("`qk_norm_whole` without `qk_norm`; state it, or remove this")
    if model.qk_norm_turned and (
        not model.qk_norm or model.qk_norm_whole or model.positions != "rope"
    ):
        raise InputError(
            "`qk_norm_turned` is of `qk_norm` of each head with `positions: rope`; state "
            "these, or remove it"
        )
    if model.embedding_scale != 1 and model.positions == "learned":
        raise InputError(
            f"`embedding_scale` {model.embedding_scale:g} with `positions: learned`, which are "
            "not scaled; remove one"
        )
    changed = [key for key in ("score_scale", "score_cap") if getattr(model, key) is not None]
    if changed and model.positions == "alibi":
        raise InputError(
            f"`{changed[0]}` with `positions: alibi`, whose scores have their own form; remove one"
        )


def _check_mlp_factors(model: Any) -> None:
    """Factors of an MLP, which it has alone and, of its gate, as SwiGLU or GeGLU."""
    unlike = {
        f"`experts` {model.experts}": model.experts > 0,
        "`parallel_residual`": model.parallel_residual,
        f"`norms: {model.norms}`": model.norms != "before",
        "blocks without an MLP": not model.has_mlp or MLP in model.mixers,
    }
    found = [name for name, there in unlike.items() if there]
    if model.gate_scale != 1 and model.mlp not in ("swiglu", "geglu"):
        found.append(f"`mlp: {model.mlp}`")
    for key in ("mlp_scale", "gate_scale"):
        if getattr(model, key) != 1 and found:
            raise InputError(
                f"`{key}` {getattr(model, key):g} with {' and '.join(found)}, but it is of one MLP "
                "in every block, behind a norm, and of a gate where it has one; remove one"
            )


def _check_weightless(model: Any) -> None:
    """Norms without weights have neither biases nor what is added to a weight."""
    kind = model.weightless_norms
    if kind == "none":
        return
    if kind == "heads" and not model.qk_norm:
        raise InputError(
            "`weightless_norms: heads` without `qk_norm`, the norms that it is of; state it, or "
            "remove this"
        )
    unlike = {
        "`norm_plus_one`": model.norm_plus_one,
        "`norm_bias`": kind == "all" and model.norm == "layernorm" and model.norm_bias,
        "`qk_norm_whole`": model.qk_norm_whole,
        "`latent_attention`": model.latent_attention is not None,
    }
    if found := [name for name, there in unlike.items() if there]:
        raise InputError(
            f"`weightless_norms: {kind}` with {' and '.join(found)}, whose norms have weights; "
            "turn that off, or remove this"
        )


def check_latent(model: Any) -> None:
    """Latent attention has no place for some parts."""
    if model.latent_attention is None:
        return
    unlike = {
        f"`norm: {model.norm}`": model.norm != "rmsnorm",
        "`norm_plus_one`": model.norm_plus_one,
        f"`positions: {model.positions}`": model.positions != "rope",
        f"`rotary_fraction` {model.rotary_fraction:g}": model.rotary_fraction != 1,
        "`qkv_bias`": model.qkv_bias,
        "`qk_norm`": model.qk_norm,
        "`attention_gate`": model.attention_gate,
        "`score_cap`": model.score_cap is not None,
        "`sliding_window`": model.sliding_window is not None,
        "`attention_pattern`": bool(model.attention_pattern),
    }
    model.latent_attention.check((model.heads, model.kv_heads, model.head_dim), unlike)
