"""What mixes the tokens of a sequence in a block: attention, or something else in its place.

A model with one mixer has `mixer_pattern` empty. With several, each kind of block sees a model in
which all blocks are like it (ModelSpec.seen_by), so that steps, operators and computation of a
block know one mixer. A mixer besides attention is a field of Architecture with its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bigplan.errors import InputError
from bigplan.spec.files.document import Spec
from bigplan.spec.pattern import in_runs

Mixer = Literal["attention", "convolution", "delta_rule", "state_space", "mlp"]
ATTENTION: Mixer = "attention"
CONVOLUTION: Mixer = "convolution"
DELTA_RULE: Mixer = "delta_rule"
STATE_SPACE: Mixer = "state_space"
MIXERS: tuple[Mixer, ...] = (ATTENTION, CONVOLUTION, DELTA_RULE, STATE_SPACE)
BESIDE_ATTENTION = MIXERS[1:]  # fields of Architecture
MLP: Mixer = "mlp"  # nothing mixes: the block is an MLP alone, and others beside it have none
# The module whose product leads from each mixer back to the residual stream.
OUTPUTS: Mapping[Mixer, str] = {
    ATTENTION: "o_proj",
    CONVOLUTION: "conv.out_proj",
    DELTA_RULE: "delta.out_proj",
    STATE_SPACE: "space.out_proj",
}


class ShortConvolution(Spec):
    """A gated causal convolution over a few tokens, as in LFM2.

    A token has three vectors b, c and v, of `hidden` channels each. A channel of the result is c
    times the sum over the last `taps` tokens of b v times the channel's own weight for each.
    """

    taps: int = Field(default=3, gt=0, le=1024)
    """tokens that it reads: itself and those just before it"""
    bias: bool = False
    """the convolution and the products around it have biases"""


class GatedDeltaRule(Spec):
    """A gated delta rule over heads, as in Qwen3-Next (Yang et al., arXiv 2412.06464).

    A value head has a state [key_dim, value_dim], which fades from token to token, and in which a
    token's key replaces a part of its value by the token's own. The token's query reads the state.
    Queries, keys and values come out of a short causal convolution and SiLU, queries and keys then
    have length 1. What a head reads is normed, and multiplied by the SiLU of a gate.
    """

    key_heads: int = Field(gt=0, le=10**5)
    """heads of queries and of keys; each serves equally many value heads"""
    value_heads: int = Field(gt=0, le=10**5)
    """heads of values, gates and states"""
    key_dim: int = Field(default=128, gt=0, le=10**5)
    """width of a query and a key"""
    value_dim: int = Field(default=128, gt=0, le=10**5)
    """width of a value"""
    taps: int = Field(default=4, gt=0, le=1024)
    """tokens that the convolution reads: itself and those just before it"""
    rate_scale: float = Field(default=1, gt=0, le=2)
    """most of its value that a key replaces; above 1, what is left may change its sign"""
    norm_epsilon: float | None = Field(default=None, gt=0)
    """that of the norm of what a head reads; null: the model's"""
    norms_before: bool = False
    """norms stand before what its blocks read, wherever `norms` has those of others"""

    @model_validator(mode="after")
    def _check(self) -> GatedDeltaRule:
        if self.value_heads % self.key_heads:
            raise InputError(
                f"`value_heads` {self.value_heads} is not a multiple of `key_heads` "
                f"{self.key_heads}; each key head must serve equally many value heads"
            )
        return self

    @property
    def value_heads_per_key(self) -> int:
        """Value heads that a key head serves."""
        return self.value_heads // self.key_heads


class StateSpace(Spec):
    """A state space over heads, Mamba-2's (Dao and Gu, arXiv 2405.21060).

    A head has a state [state, head_dim], which fades from token to token, and to which a token adds
    its key times its value. The token's query reads the state. Values, keys and queries come out of
    a short causal convolution and SiLU. How fast a state fades, and how much a token adds, is one
    number of the token and head, its time step. What heads read is multiplied by the SiLU of a
    gate, then normed by group.
    """

    heads: int = Field(gt=0, le=10**5)
    """heads of values, gates, time steps and states"""
    head_dim: int = Field(default=64, gt=0, le=10**5)
    """width of a value"""
    groups: int = Field(default=1, gt=0, le=10**5)
    """keys and queries of a token, which equally many heads each share; norms are over a group"""
    state: int = Field(default=128, gt=0, le=10**5)
    """width of a key and a query"""
    taps: int = Field(default=4, gt=0, le=1024)
    """tokens that the convolution reads: itself and those just before it"""
    convolution_bias: bool = True
    """the convolution adds a bias"""
    bias: bool = False
    """the products around it have biases"""
    least_step: float = Field(default=0.0, ge=0)
    """time steps below are raised to it"""
    most_step: float | None = Field(default=None, gt=0)
    """time steps above are lowered to it; null: none are"""
    norm: bool = True
    """what heads read is normed behind its gate; false: it is gated alone, as in Falcon-H1 0.5B"""
    scales: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """factors of a token's gates, values, keys, queries and time steps; empty: none has any"""

    @model_validator(mode="after")
    def _check(self) -> StateSpace:
        if len(self.scales) not in (0, 5):
            raise InputError(
                f"`scales` has {len(self.scales)} of five numbers; state those of gates, values, "
                "keys, queries and time steps, or none"
            )
        if self.heads % self.groups:
            raise InputError(
                f"`heads` {self.heads} is not a multiple of `groups` {self.groups}; equally many "
                "heads must share a group's keys and queries"
            )
        if self.most_step is not None and self.most_step < self.least_step:
            raise InputError(
                f"`most_step` {self.most_step:g} is below `least_step` {self.least_step:g}; "
                "correct one"
            )
        return self

    @property
    def width(self) -> int:
        """Columns of all heads' values."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Columns of all groups' keys."""
        return self.groups * self.state


class AttentionBeside(Spec):
    """Attention beside the state space of each block, as in Falcon-H1.

    Both read what one norm gives. What each gives is multiplied, and added to the residual stream.
    """

    attention_scale: float = Field(default=1.0, gt=0)
    """factor of what attention adds"""
    other_scale: float = Field(default=1.0, gt=0)
    """factor of what the state space adds"""


@lru_cache(maxsize=256)
def mixers_of(pattern: tuple[str, ...], blocks: int, alone: Mixer) -> tuple[Mixer, ...]:
    """The mixer of each block; `alone`: of all of them without a pattern."""
    if not pattern:
        return (alone,) * blocks
    every = (*MIXERS, MLP)
    words = in_runs("mixer_pattern", pattern, blocks, every)
    return tuple(one for word in words for one in every if one == word)


def check_mixers(model: Any) -> None:
    """Raise InputError where an Architecture's mixers contradict each other, or other fields.

    Any, because that module imports this one.
    """
    others = [name for name in BESIDE_ATTENTION if getattr(model, name) is not None]
    if model.mixer_pattern:
        _check_pattern(model, others)
    _check_alone(model)
    _check_beside(model, others)
    if not others:
        return
    if len(others) > 1 and not model.mixer_pattern:
        raise InputError(
            f"`{others[0]}` and `{others[1]}` without `mixer_pattern`, which says which blocks "
            "have which; state it, or remove one"
        )
    around = others == [CONVOLUTION] and model.norms == "around"
    unlike = {
        "`parallel_residual`": model.parallel_residual,
        f"`norms: {model.norms}`": model.norms != "before" and not (around or _norms_before(model)),
        "`attention_pattern`": bool(model.attention_pattern) and not _differs(model, others),
        "`latent_attention`": model.latent_attention is not None,
        f"`positions: {model.positions}`": model.positions == "alibi",
    }
    if found := [name for name, there in unlike.items() if there]:
        raise InputError(
            f"`{others[0]}` with {' and '.join(found)}, but its blocks norm what their parts read, "
            "one after the other, and attention beside it is of one kind, with heads made of the "
            "residual stream; change that, or remove it"
        )


def _differs(model: Any, others: list[Mixer]) -> bool:
    """Whether attention may differ from block to block beside these mixers."""
    alone = others in ([CONVOLUTION], [DELTA_RULE]) and bool(model.mixer_pattern)
    return alone and not any(model.dense)


def _norms_before(model: Any) -> bool:
    """Whether blocks beside attention have norms before what they read, whatever others have."""
    rule = model.delta_rule
    own = rule is not None and rule.norms_before
    return own and model.convolution is None and bool(model.mixer_pattern)


def _check_alone(model: Any) -> None:
    """Blocks that are a mixer or an MLP alone have one norm before, and are added as they are."""
    if model.has_mlp and MLP not in model.mixers:
        return
    why = "`mlp` in `mixer_pattern`" if MLP in model.mixers else "`ffn` 0"
    if not model.has_mlp and (model.experts or MLP in model.mixers):
        beside = f"`experts` {model.experts}" if model.experts else why
        raise InputError(f"`ffn` 0, which leaves blocks without an MLP, with {beside}; remove one")
    unlike = {
        "`parallel_residual`": model.parallel_residual,
        f"`norms: {model.norms}`": model.norms != "before",
        f"`residual_scale` {model.residual_scale:g}": model.residual_scale != 1,
        "`dense_blocks`": bool(model.dense_blocks),
        f"`mlp: {model.mlp}`": model.mlp == "clamped_swiglu",
    }
    if found := [name for name, there in unlike.items() if there]:
        raise InputError(
            f"{why} with {' and '.join(found)}, but a block that is a mixer or an MLP alone norms "
            "what that reads and adds what it gives; change that, or remove it"
        )


def _check_beside(model: Any, others: list[Mixer]) -> None:
    """Attention stands beside a state space in all blocks, or in none."""
    if model.attention_beside is None:
        return
    if others != [STATE_SPACE] or model.mixer_pattern or not model.has_mlp:
        raise InputError(
            "`attention_beside` is of models whose blocks all have a `state_space` and an MLP; "
            "state these without `mixer_pattern` and other mixers, or remove it"
        )


def _check_pattern(model: Any, others: list[Mixer]) -> None:
    """Every mixer of the pattern is described, and every one described is in it."""
    found = mixers_of(model.mixer_pattern, model.layers, ATTENTION)
    if set(found) == {MLP} and not others:  # as blocks see the model that are one alone
        return
    for name in BESIDE_ATTENTION:
        if name in found and name not in others:
            raise InputError(
                f"`mixer_pattern` has {name} blocks, but `{name}` does not say what they are; "
                "state it"
            )
        if name in others and name not in found:
            raise InputError(
                f"`{name}` with a `mixer_pattern` without {name} blocks in the first "
                f"{model.layers}; correct one, or remove both"
            )
    if len(set(found)) == 1:
        raise InputError(
            f"`mixer_pattern` {', '.join(model.mixer_pattern)} makes all blocks alike; remove it"
        )
    if (ATTENTION, False) not in zip(found, model.dense, strict=True):
        where = "after `dense_blocks`" if model.dense_blocks else "with experts"
        where = where if any(model.dense) else "at all"
        raise InputError(
            f"`mixer_pattern` {', '.join(model.mixer_pattern)} leaves no block with attention "
            f"{where}; have one"
        )
