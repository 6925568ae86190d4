"""Shipped models that differ in more than numbers, for tests that take long with all of them."""

from __future__ import annotations

from collections.abc import Hashable

from bigplan.spec.catalog import find_model, list_models
from bigplan.spec.model import ModelSpec


def one_of_each() -> list[str]:
    """The smallest of those whose descriptions say the same but for sizes."""
    smallest: dict[Hashable, ModelSpec] = {}
    for model in sorted(map(find_model, list_models()), key=lambda spec: spec.parameter_count):
        told = _kind(model.model_dump(mode="json", exclude={"name", "source"}))
        smallest.setdefault((told, model.heads == model.kv_heads), model)
    return sorted(model.name for model in smallest.values())


def _kind(value: object) -> Hashable:
    """A description with whether numbers are zero in place of numbers."""
    if isinstance(value, dict):
        return tuple((key, _kind(each)) for key, each in value.items())
    if isinstance(value, list):
        return frozenset(map(_kind, value))
    return value if isinstance(value, str | bool | None) else bool(value)
