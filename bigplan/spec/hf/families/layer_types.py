"""How config.json files say which blocks attend within a window, and by which angles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigplan.spec.hf.families.rope import read_scaling, write_scaling
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import compact

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_KINDS = {_LOCAL: True, _GLOBAL: False}


def read_layer_types(reader: ConfigReader, otherwise: list[bool]) -> dict[str, Any]:
    """Fields of ModelSpec by `layer_types`; `otherwise`: whether each block slides without it.

    A window that no block has is none.
    """
    kinds = reader.texts("layer_types")
    if any(kind not in _KINDS for kind in kinds) or (kinds and len(kinds) != len(otherwise)):
        reader.refuse("layer_types", f"{' or '.join(_KINDS)} for each block")
    local = [_KINDS[kind] for kind in kinds] or otherwise
    window = reader.optional_count("sliding_window") if any(local) else None
    if window is None or all(local):
        return {"sliding_window": window}
    return {"sliding_window": window, "attention_pattern": compact(local)}


def write_layer_types(model: ModelSpec) -> list[str]:
    """The `layer_types` of a config.json."""
    windows = (one.window for one in model.attentions)
    return [_GLOBAL if window is None else _LOCAL for window in windows]


def read_ropes(reader: ConfigReader, fields: dict[str, Any], local_base: float) -> dict[str, Any]:
    """`fields`, with rope by kind of block; `local_base`: of those that slide, if none is told.

    Angles of blocks that slide are not scaled.
    """
    ropes = reader.mapping("rope_parameters")
    local, far = (ropes.get(name) for name in (_LOCAL, _GLOBAL))
    if isinstance(far, Mapping):
        base = far.get("rope_theta", fields["rope_theta"])
        fields = fields | {"rope_theta": base, "rope_scaling": read_scaling(far, reader)}
    if isinstance(local, Mapping):
        if local.get("rope_type", "default") != "default":
            reader.refuse("rope_parameters", f"rope_type default for {_LOCAL}")
        local_base = local.get("rope_theta", local_base)
    if "attention_pattern" in fields:
        return fields | {"local_rope_theta": local_base}
    if fields["sliding_window"] is not None:
        return fields | {"rope_theta": local_base, "rope_scaling": None}
    return fields


def write_ropes(config: dict[str, Any], model: ModelSpec) -> dict[str, Any]:
    """`config` with rope by kind of block in place of one for all."""
    scaling = write_scaling(model.rope_scaling) or {"rope_type": "default"}
    local = model.local_rope_theta or model.rope_theta
    one = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    return one | {
        "rope_parameters": {
            _GLOBAL: {"rope_theta": model.rope_theta, **scaling},
            _LOCAL: {"rope_theta": local, "rope_type": "default"},
        }
    }
