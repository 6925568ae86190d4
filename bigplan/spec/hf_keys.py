"""Problems of a ModelSpec that was read from a config.json, in that file's own names and lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from bigplan.spec.hf_reader import Config
from bigplan.spec.problems import KeyPath, Problem

_NAME = re.compile(r"`([a-z_.]+)`")


@dataclass(frozen=True, slots=True)
class Own:
    """A config, how its family calls the fields of ModelSpec, and the lines of its keys."""

    config: Config
    keys: Mapping[str, tuple[str, ...]]
    lines: Mapping[str, int]

    def told(self, problem: Problem) -> Problem:
        """The problem with the file's names in place of the fields that stand in backticks."""
        names = _NAME.findall(problem.text)
        text = _NAME.sub(lambda found: f"`{self.key(problem.path, found[1])}`", problem.text)
        return Problem(next(self._lines(problem.path, names), None), text, problem.path)

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
