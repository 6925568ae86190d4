"""A part of a machine as data: every number says where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from bigplan.errors import InputError, quoted
from bigplan.spec.document import Spec
from bigplan.spec.problems import did_you_mean
from bigplan.units import format_bytes


class Block(Spec):
    """Part of a machine. `sources` says of every number where it comes from."""

    sources: dict[str, str]
    """for every number of this block, where it comes from"""

    @model_validator(mode="after")
    def _every_number_has_a_source(self) -> Block:
        numbers = [
            name
            for name in type(self).model_fields
            if name != "sources" and isinstance(getattr(self, name), int | float | dict)
        ]
        stated = [n for n in numbers if getattr(self, n) != type(self).model_fields[n].default]
        missing = [name for name in stated if not self.sources.get(name, "").strip()]
        if missing:
            raise InputError(
                f"no source for {', '.join(missing)}; add under `sources` where each number "
                "comes from (datasheet, 'measured ... DATE', or 'estimate: ...')"
            )
        for name in self.sources:
            if name not in numbers:
                raise InputError(
                    f"`sources` names {quoted(name)}, which is no number of this block"
                    f"{did_you_mean(name, numbers)} (numbers: {', '.join(numbers)})"
                )
        return self

    def replaced(self, values: Mapping[str, object], sources: Mapping[str, str]) -> Self:
        """This block with some values and their sources replaced, checked again."""
        data = self.model_dump() | dict(values)
        data["sources"] = self.sources | dict(sources)
        return type(self).model_validate(data)

    def limited(self, field: str, limit: int | None) -> Any:
        """This block with `field` (bytes) at most `limit`; its source says so."""
        before = getattr(self, field)
        if limit is None or limit >= before:
            return self
        told = f"capped at {format_bytes(limit)} on request (of {format_bytes(before)}: "
        sources = self.sources | {field: told + self.sources[field] + ")"}
        return self.model_copy(update={field: limit, "sources": sources})
