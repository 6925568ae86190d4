"""JSON Schema of descriptions, each field with the docstring below it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from bigplan.spec.docstrings import docstrings


def json_schema(description: type[BaseModel]) -> dict[str, Any]:
    """JSON Schema of what a file of that kind may hold."""
    schema = description.model_json_schema(mode="validation", schema_generator=_Documented)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


class _Documented(GenerateJsonSchema):
    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        for name, text in docstrings(schema["cls"]).items():
            made.get("properties", {}).get(name, {}).setdefault("description", text)
        return made
