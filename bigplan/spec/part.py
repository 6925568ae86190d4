"""A part of a machine as data: every number says where it comes from, and has its unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from bigplan.errors import InputError, quoted
from bigplan.spec.files.document import Spec
from bigplan.spec.files.problems import KeyPath
from bigplan.spec.files.words import did_you_mean
from bigplan.units import BANDWIDTH, BYTES, FLOPS, RATE, SECONDS, Quantity, exact_text, format_bytes

DEFAULT = "the default"  # the source of a figure that nothing states
WORDS = ("sources", "name", "device", "path")  # keys of parts that are no numbers


class MachinePart(Spec):
    """Part of a machine. `sources` says for every number where it comes from."""

    sources: dict[str, str]
    """for every number of this block, where it comes from"""

    @model_validator(mode="after")
    def _every_number_has_a_source(self) -> MachinePart:
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

    def without(self, field: str) -> Self:
        """This block with nothing said of `field`."""
        sources = {name: told for name, told in self.sources.items() if name != field}
        return self.model_copy(update={field: None, "sources": sources})

    def limited(self, field: str, limit: int | None) -> Any:
        """This block with `field` (bytes) at most `limit`; its source says so."""
        before = getattr(self, field)
        if limit is None or limit >= before:
            return self
        told = f"capped at {format_bytes(limit)} on request (of {format_bytes(before)}: "
        sources = self.sources | {field: told + self.sources[field] + ")"}
        return self.model_copy(update={field: limit, "sources": sources})

    def changed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The raw block with what is `given` of it; other figures given without a source say so."""
        usual = self.model_dump(mode="json", exclude_none=True)
        told = given.get("sources", {})
        if not isinstance(told, Mapping):
            return usual | dict(given)  # which validation refuses
        figures = type(self).model_fields.keys() - told.keys() - set(WORDS)
        stated = {
            name: f"estimate: {value} as stated, in place of: {self.sources.get(name, DEFAULT)}"
            for name, value in given.items()
            if name in figures and value not in (None, usual.get(name))
        }
        left = {n: source for n, source in self.sources.items() if given.get(n, source) is not None}
        return usual | dict(given) | {"sources": left | stated | dict(told)}


class Changeable:
    """Marks a part of which a file may state some figures alone; its JSON Schema needs none."""

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """The part's own schema, or that of a part or its name, without required keys."""
        made = handler(core)
        if "anyOf" in made:
            return made | {"anyOf": [_with_any_keys(each, handler) for each in made["anyOf"]]}
        return _with_any_keys(made, handler)


def _with_any_keys(schema: JsonSchemaValue, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
    resolved = handler.resolve_ref_schema(schema)
    return {name: value for name, value in resolved.items() if name != "required"}


SMALLEST = 2**20
_LARGE: Mapping[str, Quantity] = {
    **dict.fromkeys(("memory", "capacity", "endurance"), BYTES),
    **dict.fromkeys(("memory_bandwidth", "bandwidth", "read", "write"), BANDWIDTH),
    **dict.fromkeys(("host_to_device", "device_to_host"), BANDWIDTH),
    **dict.fromkeys(("node_host_to_device", "node_device_to_host"), BANDWIDTH),
    "peak_flops": FLOPS,
    "adam_rate": RATE,
}
_SHORT = ("latency", "launch_overhead")


def or_name(
    part: type[MachinePart], find: Callable[[str], MachinePart], known: Callable[[], Sequence[str]]
) -> BeforeValidator:
    """A validator: where such a part is expected, text is the name of a shipped one."""
    name = Field(json_schema_extra=lambda schema: schema.update(enum=[*known()]))
    return BeforeValidator(
        lambda value: find(value) if isinstance(value, str) else value,
        json_schema_input_type=part | Annotated[str, name],
    )


def left_out_units(block: BaseModel) -> Iterator[tuple[KeyPath, str]]:
    """Places in a machine part where a number lacks its unit, and what is wrong there."""
    for path, value in _numbers(block):
        name = path[0]
        quantity = _LARGE.get(name, SECONDS)
        if value < SMALLEST if name in _LARGE else name in _SHORT and value >= 1:
            yield (
                path,
                f"is {exact_text(quantity, value)}, which no machine has; a number without a unit "
                f"is in SI units: write the unit, such as '{quantity.example}'",
            )


def _numbers(block: BaseModel) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number by its field, or by field and precision."""
    for name, value in block:
        if isinstance(value, int | float):
            yield (name,), value
        elif isinstance(value, Mapping):
            for part, number in value.items():
                if isinstance(number, int | float):
                    yield (name, part), number
