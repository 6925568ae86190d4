"""How config.json files say which blocks attend within a window."""

from __future__ import annotations

from typing import Any

from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec
from bigplan.spec.pattern import compact

_KINDS = {"sliding_attention": True, "full_attention": False}


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
    return ["full_attention" if window is None else "sliding_attention" for window in windows]
