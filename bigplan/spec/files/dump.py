"""Descriptions back to YAML, with units, such that loading gives the same value."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from bigplan.spec.files.document import Spec, dump_document
from bigplan.units import (
    BANDWIDTH,
    BYTES,
    COUNT,
    FLOPS,
    POWER,
    PRICE,
    RATE,
    SECONDS,
    Quantity,
    exact_text,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_flops,
    parse_power,
    parse_price,
    parse_rate,
    parse_seconds,
)

_QUANTITIES: dict[Any, Quantity] = {
    parse_bytes: BYTES,
    parse_bandwidth: BANDWIDTH,
    parse_seconds: SECONDS,
    parse_flops: FLOPS,
    parse_rate: RATE,
    parse_price: PRICE,
    parse_power: POWER,
    parse_count: COUNT,
}


def to_yaml(description: Spec) -> str:
    """A cluster or model as a YAML document that `parse_document` reads back unchanged."""
    return dump_document(_plain(description))


def numbers(description: Spec) -> dict[str, tuple[float, str]]:
    """Every number of a block with its text; those in mappings as 'peak_flops.bf16'."""
    found: dict[str, tuple[float, str]] = {}
    for name, field in type(description).model_fields.items():
        value = getattr(description, name)
        values = value.items() if isinstance(value, Mapping) else [("", value)]
        texts = _field(field, value) if value is not None else None
        for key, number in values:
            if isinstance(number, int | float):
                text = texts[key] if isinstance(texts, Mapping) else texts
                found[f"{name}.{key}" if key else name] = number, str(text)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {
            name: _field(field, getattr(value, name))
            # A block's numbers first, then where they come from.
            for name, field in sorted(type(value).model_fields.items(), key=_is_sources)
            if getattr(value, name) is not None
        }
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _is_sources(item: tuple[str, FieldInfo]) -> bool:
    return item[0] == "sources"


def _field(field: FieldInfo, value: Any) -> Any:
    quantity = _quantity(field.metadata) or _optional_quantity(field.annotation)
    if quantity is not None:
        return exact_text(quantity, value)
    if isinstance(value, Mapping):
        inner = _quantity(getattr(typing.get_args(field.annotation)[-1], "__metadata__", ()))
        if inner is not None:
            return {key: exact_text(inner, item) for key, item in value.items()}
    return _plain(value)


def _optional_quantity(annotation: Any) -> Quantity | None:
    """The quantity of `Bytes | None` and the like."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return None
    found = [_quantity(getattr(part, "__metadata__", ())) for part in typing.get_args(annotation)]
    return next((quantity for quantity in found if quantity is not None), None)


def _quantity(metadata: typing.Iterable[Any]) -> Quantity | None:
    for item in metadata:
        if isinstance(item, BeforeValidator):
            return _QUANTITIES.get(item.func)
    return None
