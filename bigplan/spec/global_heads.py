"""Heads of blocks that see all tokens, where they are unlike those of blocks with a window.

Such blocks are a kind of their own, as they are where some blocks have a convolution in place of
attention. Each kind sees a model in which all blocks are like it
(ModelSpec.seen_by), so steps, operators and computation of a block ask for one width of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from bigplan.errors import InputError
from bigplan.spec.files.document import Spec
from bigplan.spec.pattern import GLOBAL, SHARING_GLOBAL, expanded


class GlobalHeads(Spec):
    """Heads of global blocks; there are as many of queries as in others."""

    head_dim: int = Field(gt=0, le=10**6)
    """width of one head's queries, keys and values"""
    kv_heads: int = Field(gt=0, le=10**5)
    """key and value heads"""
    keys_as_values: bool = False
    """values are keys as a product gives them, so that they have no matrix of their own"""


def seen_heads(model: Any, kind: str) -> Iterator[tuple[str, object]]:
    """Fields that blocks of a kind see unlike the whole model, whose global blocks are others.

    `model`: an Architecture, typed as Any because that module imports this one.
    """
    yield from (("global_heads", None), ("attention_pattern", ()), ("local_rope_theta", None))
    if kind in (GLOBAL, SHARING_GLOBAL):
        if model.global_heads is not None:
            yield from model.global_heads.model_dump().items()
        yield from (("sliding_window", None), ("attention_chunk", None))
        return
    yield "global_rope", True
    if model.local_rope_theta is not None:
        yield from (("rope_theta", model.local_rope_theta), ("rope_scaling", None))


def check_heads(model: Any) -> None:
    """Parts of heads that differ between blocks or have no matrix go with plain attention alone.

    Raises InputError.
    """
    if model.keys_as_values and not model.value_norm:
        raise InputError(
            "`keys_as_values` without `value_norm`, by which values differ from keys; state it, or "
            "remove this"
        )
    own = ("global_heads", "value_norm", "block_scale")
    for key in (key for key in own if getattr(model, key)):
        if found := [f"`{name}`" for name in _unlike(key) if getattr(model, name)]:
            raise InputError(
                f"`{key}` with {' and '.join(found)}, which blocks with it do not have; remove one"
            )
    if model.value_norm and (model.norm != "rmsnorm" or model.norm_plus_one):
        other = f"norm: {model.norm}" if model.norm != "rmsnorm" else "norm_plus_one"
        raise InputError(
            f"`value_norm` with `{other}`, but it is an RMSNorm that multiplies by nothing; remove "
            "one"
        )
    heads = model.global_heads
    if heads is None:
        return
    if len({*expanded(model.attention_pattern, model.layers)}) < 2:
        raise InputError(
            f"`global_heads` without local and global blocks among the {model.layers} that there "
            "are; state `attention_pattern`, or `head_dim` and `kv_heads` of all blocks"
        )
    if model.heads % heads.kv_heads:
        raise InputError(
            f"`heads` {model.heads} is not a multiple of `global_heads.kv_heads` "
            f"{heads.kv_heads}; each key/value head must serve equally many query heads"
        )
    if heads.keys_as_values and not model.value_norm:
        raise InputError(
            "`global_heads.keys_as_values` without `value_norm`, by which values differ from keys; "
            "state it, or remove this"
        )


_OTHERS = ("latent_attention", "mixer_pattern", "parallel_residual", "dense_blocks")
_OTHER_MIXERS = ("convolution", "delta_rule", "state_space")


def _unlike(key: str) -> tuple[str, ...]:
    """Fields that a model with this one leaves as they are by default."""
    beside = {"global_heads": ("global_query_growth",), "value_norm": ("qk_norm_whole",)}
    return (*_OTHERS, "expert_pattern", *_OTHER_MIXERS, *beside.get(key, ()))
