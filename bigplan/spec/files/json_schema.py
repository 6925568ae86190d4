"""JSON Schema of descriptions, each field with the docstring below it."""

from __future__ import annotations

from typing import Any

from annotated_types import Gt, Le
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from bigplan.spec.files.problems import docstrings
from bigplan.units import QUANTITY, positive


def json_schema(description: type[BaseModel]) -> dict[str, Any]:
    """JSON Schema of what a file of that kind may hold."""
    schema = description.model_json_schema(mode="validation", schema_generator=_Documented)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


class _Documented(GenerateJsonSchema):
    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        properties = made.get("properties", {})
        for name, text in docstrings(schema["cls"]).items():
            properties.get(name, {}).setdefault("description", text)
        for name, shown in properties.items():
            limits = schema["cls"].model_fields[name].metadata
            more = any(isinstance(limit, Gt) and limit.gt == 0 for limit in limits)
            most = next((limit.le for limit in limits if isinstance(limit, Le)), None)
            properties[name] = _limited(shown, more, most)
        return made


def _limited(schema: Any, more: bool, most: Any) -> Any:
    """The schema with a field's limits, more than 0 and `most`, in each of its quantities.

    pydantic drops limits there, or writes them as `gt` and `le`, which JSON Schema lacks.
    """
    if isinstance(schema, list):
        return [_limited(each, more, most) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if QUANTITY not in schema:
        return {key: _limited(value, more, most) for key, value in schema.items()}
    known = {key: value for key, value in schema.items() if key not in (QUANTITY, "gt", "ge", "le")}
    known = positive(known) if more else known
    numbers, text = known["anyOf"]
    return known | {"anyOf": [numbers | ({} if most is None else {"maximum": most}), text]}
