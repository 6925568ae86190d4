"""How config.json files say what each block is: which attend in a window, by which angles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from bigplan.spec.hf.families.family import ModelFamily
from bigplan.spec.hf.families.parts import Part
from bigplan.spec.hf.families.rope import read_scaling, write_scaling
from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import compact

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_KINDS = {_LOCAL: True, _GLOBAL: False}
Kind = TypeVar("Kind")


def kinds_of_blocks(reader: ConfigReader, words: Mapping[str, Kind], blocks: int) -> list[Kind]:
    """What each block is by its word in `layer_types`; empty: the file has no such list."""
    types = reader.texts("layer_types")
    if any(word not in words for word in types) or (types and len(types) != blocks):
        reader.refuse("layer_types", f"{' or '.join(words)} for each block")
    return [words[word] for word in types]


def read_layer_types(reader: ConfigReader, otherwise: list[bool]) -> dict[str, Any]:
    """Fields of ModelSpec by `layer_types`; `otherwise`: whether each block slides without it.

    A window that no block has is none.
    """
    local = kinds_of_blocks(reader, _KINDS, len(otherwise)) or otherwise
    window = reader.optional_count("sliding_window") if any(local) else None
    if window is None or all(local):
        return {"sliding_window": window}
    return {"sliding_window": window, "attention_pattern": compact(local)}


def write_layer_types(model: ModelSpec) -> list[str]:
    """The `layer_types` of a config.json."""
    windows = (one.window for one in model.attentions)
    return [_GLOBAL if window is None else _LOCAL for window in windows]


def layer_types(slides: Callable[[ConfigReader, int], bool], *others: str) -> Part:
    """Windows of blocks by `layer_types`; `slides`: whether a block does, from 0, without a list.

    `others`: keys by which `slides` says it.
    """

    def read(reader: ConfigReader) -> dict[str, Any]:
        blocks = range(reader.count("num_hidden_layers"))
        return read_layer_types(reader, [slides(reader, block) for block in blocks])

    def write(model: ModelSpec) -> dict[str, Any]:
        return {"sliding_window": model.sliding_window, "layer_types": write_layer_types(model)}

    return Part(read, write, {"attention_pattern": ("layer_types", *others)})


def turned_by_windows(windows: Part) -> Part:
    """Windows of a family whose rope turns nothing in blocks without one."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        fields = windows.read(reader)
        every = fields["sliding_window"] is not None and "attention_pattern" not in fields
        return fields | {"global_rope": every}

    return replace(windows, read=read)


def turned_blocks(reader: ConfigReader) -> list[bool]:
    """Which blocks rope turns something in: `no_rope_layers` has a 1 for each of them."""
    blocks = reader.count("num_hidden_layers")
    turned = reader.get("no_rope_layers")
    if not turned:
        every = reader.count("no_rope_layer_interval")
        turned = [int((block + 1) % every != 0) for block in range(blocks)]
    known = isinstance(turned, list) and len(turned) == blocks and set(turned) <= {0, 1}
    if not known or not any(turned):
        reader.refuse("no_rope_layers", "1 for each block with rope, at least one, 0 for others")
    return [bool(one) for one in turned]


def write_turned(model: ModelSpec) -> list[int]:
    """The `no_rope_layers` of a config.json."""
    return [int(one.rope_theta is not None) for one in model.attentions]


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


def ropes_by_kind(family: ModelFamily, base: Callable[[ConfigReader], float]) -> ModelFamily:
    """The family, with rope by kind of block; `base`: as read_ropes' local one."""
    return replace(
        family,
        read=lambda reader: read_ropes(reader, family.read(reader), base(reader)),
        write=lambda model: write_ropes(family.write(model), model),
    )


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
