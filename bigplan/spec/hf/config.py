"""Hugging Face's config.json -> ModelSpec, and back, for the families that are known.

A key is refused by name if it changes the architecture in a way that ModelSpec cannot express.
Dropout and token ids are ignored. A written config is read back and compared.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import isclose
from pathlib import Path
from typing import Any

from bigplan.errors import InputError, RefusedError, quoted
from bigplan.spec.architecture import MOST_LAYERS
from bigplan.spec.files.document import ProblemsError, validate
from bigplan.spec.files.problems import DocumentProblem, KeyPath
from bigplan.spec.files.reading import read_json
from bigplan.spec.hf.families import FAMILIES
from bigplan.spec.hf.families.beside_towers import BESIDE_TOWERS
from bigplan.spec.hf.reader import Config, ConfigReader
from bigplan.spec.hf.refusals import refuse_adapter, refuse_experts, refuse_foreign, refuse_type
from bigplan.spec.hf.towers import text_model
from bigplan.spec.model import ModelSpec

SUPPORTED_MODEL_TYPES: tuple[str, ...] = tuple(FAMILIES)
# Families with experts, each with the keys that it reads.
EXPERT_FAMILIES: Mapping[str, Collection[str]] = {
    name: {*family.defaults, *chain(*family.keys.values())}
    for name, family in FAMILIES.items()
    if "experts" in family.keys
}


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
            f"{where}: missing key 'model_type'; a .json file is read as Hugging Face's "
            "config.json. bigplan's own description of a model is YAML: name the file .yaml, and "
            "`bigplan models tiny-llama-test` prints one to compare with. Types that are read: "
            f"{', '.join(FAMILIES)}"
        )
    config, lines = text_model(config, lines or {}, where)
    refuse_type(config, where)
    refuse_experts(config, where, EXPERT_FAMILIES)
    if model_type not in FAMILIES:
        raise RefusedError(
            f"{where}: model_type {quoted(model_type)} is not supported "
            f"(supported: {', '.join(FAMILIES)}); "
            "a model of the same shape can be written as a model YAML"
        )
    refuse_foreign(config, where)
    family = FAMILIES[model_type]
    reader = ConfigReader(config, family.defaults, where, lines)
    for key in family.keys.get("layers", ()):  # families list them one by one
        reader.at_most(key, MOST_LAYERS)
    fields = family.read(reader)
    path = Path(where)
    name = reader.name() or (path.parent.name if path.stem == "config" else path.stem)
    source = f"Hugging Face config.json ({model_type})"
    if model_type in BESIDE_TOWERS:
        source += ", its text model alone"
    if config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers"):
        source += ", without layers that predict further tokens"
    fields |= {"name": name or model_type, "source": source}
    try:
        return validate(fields, ModelSpec, where)
    except ProblemsError as error:
        own = Own(config, family.keys, lines)
        raise ProblemsError([own.told(problem) for problem in error.problems], where) from None


def to_hf_config(model: ModelSpec, like: str = "") -> dict[str, Any]:
    """The config.json of a family that computes what `model` does, read back and compared.

    Of several families, `like` comes first.

    Raises RefusedError where no family does; it names the differences of the nearest one.
    """
    unlike: dict[str, tuple[str, ...]] = {}
    for family in sorted(FAMILIES, key=lambda name: name != like):  # else in their order
        config = FAMILIES[family].write(model)
        try:
            unlike[family] = differences(model, from_hf_config(config))
        except InputError:  # the family has no key for what makes the model legal, such as head_dim
            continue
        if not unlike[family]:
            return config
    family = min(unlike, key=lambda name: len(unlike[name]))
    named = ", ".join(f"{key} {getattr(model, key)}" for key in unlike[family])
    raise RefusedError(
        f"{model.name} has {named}, which Hugging Face's {family} has not, nor another of the "
        f"families that are written: {', '.join(FAMILIES)}"
    )


def differences(one: ModelSpec, other: ModelSpec) -> tuple[str, ...]:
    """The fields in which two models differ and that have a meaning for the first."""
    ignored = {"name", "source"}
    if one.norm == "rmsnorm":
        ignored.add("norm_bias")
    if one.positions != "rope":
        ignored |= {"rope_theta", "rotary_fraction"}
    # To rounding: a file may have another factor of it.
    if isclose(one.scale_of_scores, other.scale_of_scores, rel_tol=1e-12):
        ignored.add("score_scale")
    if one.routed_by == other.routed_by:
        ignored.add("routing")
    if one.attentions == other.attentions:  # which several patterns and bases may give
        ignored |= {"sliding_window", "attention_pattern", "local_rope_theta", "global_rope"}
        ignored.add("rope_theta")
        if not any(attends.scaled for attends in one.attentions):
            ignored.add("rope_scaling")
    if one.mixers == other.mixers:
        ignored.add("mixer_pattern")
    if one.dense == other.dense:
        ignored |= {"dense_blocks", "expert_pattern"}
    names = (name for name in ModelSpec.model_fields if name not in ignored)
    return tuple(name for name in names if getattr(one, name) != getattr(other, name))


_NAME = re.compile(r"`([a-z_.]+)`")


@dataclass(frozen=True, slots=True)
class Own:
    """A config with its family's names for fields of ModelSpec, and the lines of its keys."""

    config: Config
    keys: Mapping[str, tuple[str, ...]]
    lines: Mapping[str, int]

    def told(self, problem: DocumentProblem) -> DocumentProblem:
        """The problem with the file's names in place of the field names in backticks."""
        names = _NAME.findall(problem.text)
        text = _NAME.sub(lambda found: f"`{self.key(problem.path, found[1])}`", problem.text)
        return DocumentProblem(next(self._lines(problem.path, names), None), text, problem.path)

    def key(self, path: KeyPath, name: str) -> str:
        """The file's key of a field; a nested model's own fields are named without their path."""
        inner = ".".join((*map(str, path), name))
        known = self.keys.get(inner) or self.keys.get(name) or (name,)
        there = (key for key in known if self._has(key))
        inside = (key for key in known if "." in key and self._has(key.partition(".")[0]))
        plain = (key for key in known if "." not in key)
        return next(chain(there, inside, plain), known[0])

    def _has(self, key: str) -> bool:
        outer, _, inner = key.partition(".")
        value = self.config.get(outer)
        return value is not None and (not inner or (isinstance(value, Mapping) and inner in value))

    def _lines(self, path: KeyPath, names: list[str]) -> Iterator[int]:
        """Lines of the named keys, inner ones first, then of those around them."""
        keys = [self.key(path, name) for name in names]
        keys.sort(key=lambda key: "." not in key)
        for key in (*keys, *(key.partition(".")[0] for key in keys)):
            if key in self.lines:
                yield self.lines[key]
