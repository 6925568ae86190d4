"""Hugging Face's config.json -> ModelSpec, for the architectures that are supported by name.

Keys that change the architecture in a way that ModelSpec cannot say are refused, by name.
Dropout and token ids are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bigplan.errors import InputError, RefusedError, quoted
from bigplan.spec.document import ProblemsError, validate
from bigplan.spec.families import FAMILIES
from bigplan.spec.hf_keys import Own
from bigplan.spec.hf_reader import Config, Reader
from bigplan.spec.hf_refusals import (
    refuse_adapter,
    refuse_experts,
    refuse_foreign,
    refuse_type,
)
from bigplan.spec.model import ModelSpec
from bigplan.spec.problems import did_you_mean
from bigplan.spec.reading import read_json

SUPPORTED_MODEL_TYPES: tuple[str, ...] = tuple(FAMILIES)


def load_hf_config(path: Path) -> ModelSpec:
    """Read a config.json. Raises InputError, and RefusedError for what is not supported."""
    found = read_json(path)
    if not isinstance(found.data, dict):
        raise InputError(f"{path}: holds no JSON object; expected a Hugging Face config.json")
    return from_hf_config(found.data, str(path), found.lines)


def from_hf_config(
    config: Config, where: str = "config.json", lines: Mapping[str, int] | None = None
) -> ModelSpec:
    """ModelSpec of a config's plain data, whose keys stand on `lines` where those are known.

    Raises InputError and RefusedError.
    """
    refuse_adapter(config, where)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(
            f"{where}: missing key 'model_type'; expected a Hugging Face config.json "
            f"with one of {', '.join(FAMILIES)}"
        )
    refuse_experts(config, where)
    refuse_type(model_type, where)
    if model_type not in FAMILIES:
        raise RefusedError(
            f"{where}: model_type {quoted(model_type)} is not supported"
            f"{did_you_mean(model_type, FAMILIES)} (supported: {', '.join(FAMILIES)}); "
            "a model of the same shape can be written as a model YAML"
        )
    refuse_foreign(config, where)
    family = FAMILIES[model_type]
    reader = Reader(config, family.defaults, where, lines or {})
    fields = family.read(reader)
    name = reader.name() or Path(where).parent.name
    fields |= {"name": name or model_type, "source": f"Hugging Face config.json ({model_type})"}
    try:
        return validate(fields, ModelSpec, where)
    except ProblemsError as error:
        own = Own(config, family.keys, lines or {})
        raise ProblemsError([own.told(problem) for problem in error.problems], where) from None
