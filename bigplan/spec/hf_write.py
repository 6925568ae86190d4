"""ModelSpec -> Hugging Face's config.json: the inverse of hf.py, and checked to be that."""

from __future__ import annotations

from typing import Any

from bigplan.errors import InputError, RefusedError
from bigplan.spec.families import FAMILIES
from bigplan.spec.hf import from_hf_config
from bigplan.spec.model import ModelSpec


def to_hf_config(model: ModelSpec) -> dict[str, Any]:
    """The config.json of a family that computes what `model` does, read back and compared.

    Raises RefusedError where no family does, naming what the nearest one has otherwise.
    """
    unlike: dict[str, tuple[str, ...]] = {}
    for family, known in FAMILIES.items():
        config = known.write(model)
        try:
            unlike[family] = differences(model, from_hf_config(config))
        except InputError:  # the family has no key for what makes the model legal, such as head_dim
            continue
        if not unlike[family]:
            return config
    family = min(unlike, key=lambda name: len(unlike[name]))
    named = ", ".join(f"{key} {getattr(model, key)}" for key in unlike[family])
    raise RefusedError(
        f"{model.name} has {named}, which Hugging Face's {family} has not, nor another of the "
        f"families that are written: {', '.join(FAMILIES)}"
    )


def differences(one: ModelSpec, other: ModelSpec) -> tuple[str, ...]:
    """The fields in which two models differ, as far as they mean something for the first."""
    ignored = {"name", "source"}
    if one.norm == "rmsnorm":
        ignored.add("norm_bias")
    if one.positions != "rope":
        ignored |= {"rope_theta", "rotary_fraction"}
    names = (name for name in ModelSpec.model_fields if name not in ignored)
    return tuple(name for name in names if getattr(one, name) != getattr(other, name))
