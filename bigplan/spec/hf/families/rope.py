"""How config.json files say by which angles rope turns queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigplan.spec.hf.families.parts import Part
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec
from bigplan.spec.rope_scaling import FAST, SLOW, RopeScaling

_LENGTH = "original_max_position_embeddings"
PLACES = ("rope_parameters", "rope_scaling")  # newer files have the first, which holds everything
_OF_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # which files call so, too
_FIELDS = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
    "rounded": "truncate",
    "attention_factor": "attention_factor",
    **{field: field for field in _OF_YARN},
}
_OLD_NAMES = {"su": "longrope"}


def _within(key: str) -> tuple[str, ...]:
    return tuple(f"{place}.{key}" for place in PLACES)


ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "rope_theta": (*_within("rope_theta"), "rope_theta"),
    "rotary_fraction": (*_within("partial_rotary_factor"), "partial_rotary_factor"),
    "rope_scaling": PLACES,
    "rope_scaling.name": (*_within("rope_type"), *_within("type")),
    **{f"rope_scaling.{field}": _within(key) for field, key in _FIELDS.items()},
}
_SCALINGS = (None, "default", "linear", "llama3", "dynamic", "yarn", "longrope", "su")


def read_rope(reader: ConfigReader) -> dict[str, Any]:
    """Base of the rotary angles, how they are scaled, and the part of a head that is rotated."""
    key = next((place for place in PLACES if reader.config.get(place)), PLACES[0])
    rope = reader.mapping(key)
    if rope.get("rope_type", rope.get("type")) not in _SCALINGS:
        reader.refuse(key, f"rope_type {', '.join(s for s in _SCALINGS if s)}")
    part = rope.get("partial_rotary_factor", reader.get("partial_rotary_factor"))
    return {
        "rope_theta": rope.get("rope_theta", reader.get("rope_theta")),
        "rope_scaling": read_scaling(rope, reader),
        "rotary_fraction": 1.0 if part is None else part,
    }


def read_scaling(rope: Mapping[str, Any], reader: ConfigReader) -> dict[str, Any] | None:
    """The fields of ModelSpec.rope_scaling; "type" is the old name of "rope_type"."""
    name = rope.get("rope_type", rope.get("type"))
    if name in (None, "default"):
        return None
    name = _OLD_NAMES.get(name, name)
    if name == "proportional":
        if rope.get("factor", 1.0) != 1.0:
            reader.refuse("rope_parameters", "factor 1 for rope_type proportional")
        return {"name": name, "turned": rope.get("partial_rotary_factor", 1.0)}
    length = rope.get(_LENGTH, reader.config.get(_LENGTH))
    if length is None and name in ("llama3", "yarn", "longrope"):
        length = reader.count("max_position_embeddings")
    fields = {"name": name} | {field: rope.get(key) for field, key in _FIELDS.items()}
    fields["original_length"] = length
    if name == "longrope":
        fields |= _read_longrope(rope, reader, length)
    of_yarn = {field: fields.pop(field) or None for field in _OF_YARN}
    rounded, stated = fields.pop("rounded"), fields.pop("attention_factor")
    if name in ("yarn", "longrope"):
        fields["attention_factor"] = stated
    if name == "yarn":
        fields["rounded"] = rounded
        of_yarn["beta_fast"] = of_yarn["beta_fast"] or FAST
        of_yarn["beta_slow"] = of_yarn["beta_slow"] or SLOW
        fields |= of_yarn
    return {key: value for key, value in fields.items() if value is not None}


def _read_longrope(rope: Mapping[str, Any], reader: ConfigReader, length: object) -> dict[str, Any]:
    """Its factor is the ratio of the longest sequence to those of the pre-training, if not told."""
    if rope.get("factor") is not None or not isinstance(length, int) or length < 1:
        return {}
    return {"factor": reader.count("max_position_embeddings") / length}


def _in_parameters(model: ModelSpec) -> dict[str, Any]:
    scaling = write_scaling(model.rope_scaling) or {"rope_type": "default"}
    return {"rope_parameters": {"rope_theta": model.rope_theta, **scaling}}


# Rope in one key, for classes that have another scaling where it is absent, and the keys that it
# takes the place of.
IN_PARAMETERS = Part(write=_in_parameters)
BESIDE_PARAMETERS = ("rope_theta", "rope_scaling")


PARTLY_TURNED = Part(write=lambda model: {"partial_rotary_factor": model.rotary_fraction})


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The `rope_scaling` of a config.json."""
    if scaling is None:
        return None
    fields = {key: getattr(scaling, field) for field, key in _FIELDS.items()}
    if scaling.rounded:  # as all files have it that say nothing
        del fields[_FIELDS["rounded"]]
    for field in _OF_YARN:
        if scaling.name != "yarn" or not getattr(scaling, field):
            del fields[_FIELDS[field]]
    fields["rope_type"] = scaling.name
    if scaling.turned is not None:
        fields["partial_rotary_factor"] = scaling.turned
    told = {key: value for key, value in fields.items() if value not in (None, ())}
    return {key: [*value] if isinstance(value, tuple) else value for key, value in told.items()}
