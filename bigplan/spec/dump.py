"""Descriptions back to YAML, with units, such that loading gives the same value."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from bigplan.spec.document import Spec, dump_document
from bigplan.units import (
    BANDWIDTH,
    BYTES,
    FLOPS,
    RATE,
    SECONDS,
    Quantity,
    exact_text,
    parse_bandwidth,
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_seconds,
)

_QUANTITIES: dict[Any, Quantity] = {
    parse_bytes: BYTES,
    parse_bandwidth: BANDWIDTH,
    parse_seconds: SECONDS,
    parse_flops: FLOPS,
    parse_rate: RATE,
}


def to_yaml(description: Spec) -> str:
    """A cluster or model as a YAML document that `parse_document` reads back unchanged."""
    return dump_document(_plain(description))


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
    quantity = _quantity(field.metadata)
    if quantity is not None:
        return exact_text(quantity, value)
    if isinstance(value, Mapping):
        inner = _quantity(getattr(typing.get_args(field.annotation)[-1], "__metadata__", ()))
        if inner is not None:
            return {key: exact_text(inner, item) for key, item in value.items()}
    return _plain(value)


def _quantity(metadata: typing.Iterable[Any]) -> Quantity | None:
    for item in metadata:
        if isinstance(item, BeforeValidator):
            return _QUANTITIES.get(item.func)
    return None
