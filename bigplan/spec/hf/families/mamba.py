"""How config.json files say what a state space of Mamba-2 is, and how files name its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.mixers import OUTPUTS, STATE_SPACE, StateSpace
from bigplan.spec.model import ModelSpec
from bigplan.spec.state_space_steps import (
    CONVOLVED,
    GATES,
    KEYS,
    LOG_DECAY,
    NORM,
    QUERIES,
    SKIP,
    STEP_OFFSET,
    STEPS,
    VALUES,
)

_COUNTS = {
    "heads": "mamba_n_heads",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "taps": "mamba_d_conv",
}
_FLAGS = {"convolution_bias": "mamba_conv_bias", "bias": "mamba_proj_bias"}
# Of files in which blocks are a mixer alone.
ALONE_FLAGS = {"convolution_bias": "use_conv_bias", "bias": "use_bias"}
_LIMITS = "time_step_limit"
MAMBA_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    _LIMITS: None,
}


def keys_of(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """A family's keys of a state space, of those of fields of StateSpace but limits."""
    limits = dict.fromkeys(("least_step", "most_step"), _LIMITS)
    return {f"state_space.{field}": (key,) for field, key in {**names, **limits}.items()}


MAMBA_KEYS = keys_of(_COUNTS | _FLAGS | {"head_dim": "mamba_d_head"})
# One below another, as both matrices have them.
MAMBA_FUSED = ((GATES, VALUES, KEYS, QUERIES, STEPS), CONVOLVED)


def mamba_names(within: str) -> Mapping[str, str]:
    """Names of the tensors of a module, such as "model.layers.{}.mamba"."""
    return {
        **dict.fromkeys(MAMBA_FUSED[0], f"{within}.in_proj"),
        **dict.fromkeys(CONVOLVED, f"{within}.conv1d"),
        LOG_DECAY: f"{within}.A_log",
        STEP_OFFSET: f"{within}.dt_bias",
        SKIP: f"{within}.D",
        NORM.removesuffix(".weight"): f"{within}.norm",
        OUTPUTS[STATE_SPACE]: f"{within}.out_proj",
    }


def read_state_space(reader: ConfigReader, width: int | None = None) -> dict[str, Any]:
    """Fields of StateSpace; `width`: columns of all values, if not those of `mamba_expand`."""
    fields: dict[str, Any] = {field: reader.count(key) for field, key in _COUNTS.items()}
    wide, heads = "mamba_d_ssm", fields["heads"]
    if width is None:
        width = reader.count("mamba_expand") * reader.count("hidden_size")
        wide = "mamba_expand x hidden_size"
    told = reader.get("mamba_d_head")
    head_dim = width // heads if told in (None, "auto") else reader.count("mamba_d_head")
    if head_dim * heads != width:
        reader.refuse("mamba_n_heads", f"{wide}, {width}, over mamba_d_head {head_dim}")
    flags = {field: reader.flag(key) for field, key in _FLAGS.items()}
    return fields | flags | {"head_dim": head_dim} | _read_limits(reader)


def read_alone(reader: ConfigReader, counts: Mapping[str, str]) -> dict[str, Any]:
    """Fields of StateSpace by a family's own keys of all its sizes, and ALONE_FLAGS."""
    fields = {field: reader.count(key) for field, key in counts.items()}
    flags = {field: reader.flag(key) for field, key in ALONE_FLAGS.items()}
    return fields | flags | _read_limits(reader)


def write_alone(space: StateSpace, counts: Mapping[str, str]) -> dict[str, Any]:
    """The same keys."""
    return {
        **{key: getattr(space, field) for field, key in {**counts, **ALONE_FLAGS}.items()},
        **_written_limits(space),
    }


def _read_limits(reader: ConfigReader) -> dict[str, Any]:
    """Limits of time steps; none above is Infinity, which transformers writes in its own way."""
    limits = reader.get(_LIMITS)
    if limits is None:
        return {}
    if not isinstance(limits, list) or len(limits) != 2:
        reader.refuse(_LIMITS, "two numbers, such as [0.0, Infinity]")
    least, most = limits
    endless = most in (float("inf"), "Infinity", {"__float__": "Infinity"})
    return {"least_step": least, "most_step": None if endless else most}


def write_state_space(model: ModelSpec) -> dict[str, Any]:
    """The same keys, of a model without a state space any."""
    space = model.state_space or StateSpace(heads=1, head_dim=model.hidden)
    return {
        "mamba_expand": space.width // model.hidden,
        "mamba_d_head": space.head_dim,
        **{key: getattr(space, field) for field, key in (_COUNTS | _FLAGS).items()},
        **_written_limits(space),
    }


def _written_limits(space: StateSpace) -> dict[str, Any]:
    """None above is left out: JSON has no word for it."""
    return {} if space.most_step is None else {_LIMITS: [space.least_step, space.most_step]}
