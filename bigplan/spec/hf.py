"""Hugging Face's config.json -> ModelSpec, for the architectures that are supported by name.

Keys that change the architecture in a way that ModelSpec cannot say are refused, by name.
Dropout and token ids are ignored.
"""

from __future__ import annotations

import json
from pathlib import Path

from bigplan.errors import InputError, RefusedError
from bigplan.spec.document import read_text, validate
from bigplan.spec.hf_families import FAMILIES, Config, Reader
from bigplan.spec.hf_refusals import refuse_adapter, refuse_experts, refuse_foreign
from bigplan.spec.model import ModelSpec
from bigplan.spec.problems import did_you_mean

SUPPORTED_MODEL_TYPES: tuple[str, ...] = tuple(FAMILIES)


def load_hf_config(path: Path) -> ModelSpec:
    """Read a config.json. Raises InputError, and RefusedError for what is not supported."""
    try:
        config = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}; correct it") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: holds no JSON object; expected a Hugging Face config.json")
    return from_hf_config(config, str(path))


def from_hf_config(config: Config, where: str = "config.json") -> ModelSpec:
    """ModelSpec of a config's plain data. Raises InputError and RefusedError."""
    refuse_adapter(config, where)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(
            f"{where}: missing key 'model_type'; expected a Hugging Face config.json "
            f"with one of {', '.join(FAMILIES)}"
        )
    refuse_experts(config, where)
    if model_type not in FAMILIES:
        raise RefusedError(
            f"{where}: model_type {model_type!r} is not supported"
            f"{did_you_mean(model_type, FAMILIES)} (supported: {', '.join(FAMILIES)}); "
            "a model of the same shape can be written as a model YAML"
        )
    refuse_foreign(config, where)
    read, defaults = FAMILIES[model_type]
    fields = read(Reader(config, defaults, where))
    name = str(config.get("_name_or_path") or config.get("name") or Path(where).parent.name)
    fields |= {"name": name or model_type, "source": f"Hugging Face config.json ({model_type})"}
    return validate(fields, ModelSpec, where)
