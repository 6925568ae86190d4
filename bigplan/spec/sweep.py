"""Many experiments in one file: a base, and the keys that are swept over it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from bigplan.errors import InputError
from bigplan.spec.catalog import find_model, names_path
from bigplan.spec.experiment import FLAT, Experiment, rebased, set_key
from bigplan.spec.files.document import ProblemsError, Spec, load_data, validate_nodes
from bigplan.spec.files.problems import KeyPath, problem_at
from bigplan.spec.files.reading import read_text, user_path

MOST_POINTS = 10_000
SweptKey = str  # dotted, as training.global_batch or set.tp
SweptValues = dict[SweptKey, tuple[Any, ...]]


class Sweep(Spec):
    """Which experiments: every combination of `grid`, of `zip` and of `points`.

    Keys are an experiment's, dotted: cluster, nodes, training.sequence_length, set.tp, caps.gpu,
    hardware.nvme.drives.
    """

    grid: SweptValues = Field(default_factory=dict)
    """key: values; every combination of them"""
    zip: SweptValues = Field(default_factory=dict)
    """key: values, equally many each; the first of all together, the second of all, ..."""
    points: tuple[dict[SweptKey, Any], ...] = ()
    """key: value, one mapping for each experiment"""

    @model_validator(mode="after")
    def _check(self) -> Sweep:
        for name in ("grid", "zip"):
            for key, values in getattr(self, name).items():
                if not values:
                    raise InputError(f"sweep.{name}.{key} has no values; give at least one")
        lengths = {key: len(values) for key, values in self.zip.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{key} has {number}" for key, number in lengths.items())
            raise InputError(f"sweep.zip goes through its values side by side, but {told}")
        keys = [*self.grid, *self.zip, *dict.fromkeys(k for point in self.points for k in point)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice:
            raise InputError(f"sweep has {twice} in two of grid, zip and points; leave one out")
        if (number := self.count) > MOST_POINTS:
            raise InputError(
                f"sweep has {number:,} combinations, and at most {MOST_POINTS:,} are planned; give "
                "fewer values"
            )
        return self

    @property
    def count(self) -> int:
        """How many experiments there are."""
        number = max((len(values) for values in self.zip.values()), default=1)
        for values in self.grid.values():
            number *= len(values)
        return number * max(1, len(self.points))

    def paths(self) -> Iterator[dict[SweptKey, KeyPath]]:
        """The swept keys of every experiment, each with the place of its value in the sweep.

        The last key of `grid` changes fastest.
        """
        zipped = range(max((len(values) for values in self.zip.values()), default=1))
        grid = [range(len(values)) for values in self.grid.values()]
        for number, index in itertools.product(range(max(1, len(self.points))), zipped):
            for picked in itertools.product(*grid):
                found: dict[SweptKey, KeyPath] = {}
                if self.points:
                    found |= {key: ("points", number, key) for key in self.points[number]}
                found |= {key: ("zip", key, index) for key in self.zip}
                found |= {key: ("grid", key, at) for key, at in zip(self.grid, picked, strict=True)}
                yield found

    def value(self, path: KeyPath) -> Any:
        """The value at `path`."""
        found: Any = getattr(self, str(path[0]))
        for part in path[1:]:
            found = found[part]
        return found


class Find(Spec):
    """The largest value of one key with which a plan fits."""

    largest: str = Field(min_length=1)
    """its dotted key, such as training.sequence_length, set.micro_batch or model.layers"""
    least: int = Field(default=1, gt=0, le=10**9)
    """the smallest value that counts; where it does not fit, nothing does"""
    most: int = Field(default=2**20, gt=0, le=10**9)
    """the largest value that is tried"""
    multiple_of: int = Field(default=1, gt=0, le=10**9)
    """only multiples of this are tried"""

    @model_validator(mode="after")
    def _check(self) -> Find:
        low, high = -(-self.least // self.multiple_of), self.most // self.multiple_of
        if low > high:
            raise InputError(
                f"find tries multiples of {self.multiple_of} from {self.least} to {self.most}, "
                "and there is none; lower `least` or raise `most`"
            )
        return self


class Study(Experiment):
    """A file of many experiments. Paths in it are relative to it."""

    sweep: Sweep = Sweep()
    find: Find | None = None
    """absent: the experiments are planned as they stand"""
    measure: Literal["none", "all"] | int = "none"
    """which are launched one after another: none, all that run here, or the N fastest predicted"""

    @model_validator(mode="after")
    def _measure(self) -> Study:
        if isinstance(self.measure, int) and self.measure < 1:
            raise InputError(f"measure is {self.measure}; write none, all, or a number from 1 on")
        return self


@dataclass(frozen=True)
class Point:
    """One experiment of a study, the swept keys with their values, and where the file has them."""

    index: int
    values: Mapping[SweptKey, Any]
    places: Mapping[SweptKey, KeyPath]
    experiment: Experiment


@dataclass(frozen=True)
class Studied:
    """A study as read, with all its experiments."""

    path: Path
    study: Study
    points: tuple[Point, ...]
    root: yaml.Node | None

    @property
    def keys(self) -> tuple[SweptKey, ...]:
        """Swept keys in the order in which the file has them."""
        return tuple(dict.fromkeys(key for point in self.points for key in point.values))

    def problem(self, point: Point, key: SweptKey, text: str) -> InputError:
        """An error about a key of one experiment, with its line."""
        place = point.places.get(key, split_key(key))
        return InputError(f"{self.path}{problem_at(place, text, self.root)}")


OWN = tuple(name for name in Study.model_fields if name not in Experiment.model_fields)
_FIXED = (*OWN, "launch", "prefer", "within", "max_wear")  # one value for all experiments of a file


def load_study(path: Path) -> Studied:
    """Read a study; every experiment is checked, each problem told with its line.

    Raises InputError.
    """
    data, root = load_data(read_text(path), str(path))
    study = validate_nodes(data, root, Study, str(path))
    base = {key: value for key, value in data.items() if key not in OWN}
    if study.find is not None:
        _check_key(study.find.largest, ("find", "largest"), root, path)
    points = []
    for index, found in enumerate(study.sweep.paths()):
        places: dict[SweptKey, KeyPath] = {key: ("sweep", *place) for key, place in found.items()}
        values = {key: study.sweep.value(place) for key, place in found.items()}
        raw: Mapping[str, Any] = base
        nodes = root
        for key, value in values.items():
            _check_key(key, places[key], root, path)
            raw = _set(raw, key, value, path.parent)
            nodes = grafted(nodes, split_key(key), node_at(root, places[key]))
        experiment = validate_nodes(raw, nodes, Experiment, str(path))
        experiment = rebased(experiment, path.parent, {})
        points.append(Point(index, values, places, experiment))
    if study.find is not None:
        _check_found(study.find, base, root, path)
    return Studied(path, study, tuple(points), root)


def _check_found(find: Find, base: Mapping[str, Any], root: yaml.Node | None, path: Path) -> None:
    """Raise InputError where the key to look for is none; its values are tried one by one later."""
    raw = _set(base, find.largest, find.least, path.parent)
    place = node_at(root, ("find", "largest"))
    try:
        validate_nodes(raw, grafted(root, split_key(find.largest), place), Experiment, str(path))
    except ProblemsError as error:
        unknown = [one for one in error.problems if one.text.startswith("unknown key")]
        if unknown:
            raise ProblemsError(unknown, str(path)) from None


def split_key(key: SweptKey) -> KeyPath:
    """The parts of a dotted key: decisions and hardware have dots in their own names."""
    first, _, rest = key.partition(".")
    return (first, rest) if first in FLAT and rest else tuple(key.split("."))


def _check_key(key: SweptKey, place: KeyPath, root: yaml.Node | None, path: Path) -> None:
    if key.partition(".")[0] in _FIXED or key in FLAT:
        text = f"cannot say {key}, which is the same for all experiments of a file"
        raise InputError(f"{path}{problem_at(place, text, root)}")


def _set(raw: Mapping[str, Any], key: SweptKey, value: Any, folder: Path) -> Mapping[str, Any]:
    if key.startswith("model.") and isinstance(raw.get("model"), str):
        raw = {**raw, "model": written_out(raw["model"], folder)}
    # Text is quoted, or it would be read as YAML once more.
    return set_key(raw, key, json.dumps(value) if isinstance(value, str) else value)


def written_out(model: str, folder: Path) -> dict[str, Any]:
    """The keys of a named model, so that one of them can change. Raises InputError."""
    name = str(folder / user_path(model)) if names_path(model, folder) else model
    return find_model(name).model_dump(mode="json", exclude_none=True)


def node_at(root: yaml.Node | None, path: KeyPath) -> yaml.Node | None:
    """The node of the value at `path`; None where there is none."""
    node = root
    for part in path:
        if isinstance(node, yaml.MappingNode):
            node = next((value for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
        else:
            return None
    return node


def grafted(root: yaml.Node | None, path: KeyPath, value: yaml.Node | None) -> yaml.Node | None:
    """The tree with `value` at `path`, so that problems are reported with the value's line."""
    if not path or root is None or value is None:
        return value
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    inner = next((node for key, node in pairs if key.value == path[0]), None)
    if inner is None:
        inner = yaml.MappingNode("tag:yaml.org,2002:map", [], value.start_mark, value.end_mark)
    key = yaml.ScalarNode("tag:yaml.org,2002:str", str(path[0]), value.start_mark, value.end_mark)
    others = [pair for pair in pairs if pair[0].value != path[0]]
    pair = (key, grafted(inner, path[1:], value))
    return yaml.MappingNode(root.tag, [*others, pair], root.start_mark, root.end_mark)
