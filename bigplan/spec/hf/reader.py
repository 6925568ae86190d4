"""Looks up what a config.json says, each key as the type that it must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from bigplan.errors import InputError, RefusedError, quoted

_REQUIRED = object()

Config = Mapping[str, Any]


@dataclass(frozen=True)
class ConfigReader:
    """A config with its class's defaults, and for messages the file's name and its keys' lines."""

    config: Config
    defaults: Mapping[str, Any]
    where: str
    lines: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)  # keys, and what the file calls them

    def saying(self, keys: Mapping[str, Any]) -> ConfigReader:
        """As if the file said these, whatever it does."""
        return replace(self, config={**self.config, **keys})

    def by_old_names(self, names: Mapping[str, str]) -> ConfigReader:
        """With today's names, by which `names` has older ones; where both are there, they count."""
        there = {new: old for new, old in names.items() if {new, old} & {*self.config} == {old}}
        return self.renamed(there)

    def renamed(self, names: Mapping[str, str]) -> ConfigReader:
        """With `names` of keys for what the file calls otherwise."""
        told = {key: self.get(own) for key, own in names.items()}
        return replace(self.saying(told), names={**self.names, **names})

    def get(self, key: str) -> Any:
        """The key's value, or its default; InputError where neither exists.

        Only for values that are validated as a field of ModelSpec.
        """
        value = self._value(key, _REQUIRED)
        if value is _REQUIRED:
            raise InputError(
                f"{self.where}: missing key {key!r}, which model_type "
                f"{quoted(self.config['model_type'])} needs; add it, or take the model's own "
                "config.json"
            )
        return value

    def count(self, key: str, least: int = 1) -> int:
        """A whole number."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, value, f"a whole number of at least {least}")
        return value

    def optional_count(self, key: str, least: int = 1) -> int | None:
        """As `count`, or None where the key is null or absent."""
        return None if self._value(key) is None else self.count(key, least)

    def at_most(self, key: str, most: int) -> None:
        """Refuse a number above `most`."""
        value = self._value(key)
        if isinstance(value, int) and value > most:
            raise self._wrong(key, value, f"at most {most}")

    def number(self, key: str) -> float:
        """A number above 0."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; null is false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return bool(value)

    def text(self, key: str) -> str:
        """Text."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; none where the key is null or absent."""
        value = self._value(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of texts")
        return tuple(value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Keys and values; none where the key is null or absent."""
        value = self._value(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return value

    def places(self, key: str, blocks: int) -> list[int]:
        """A list with numbers of blocks, of so many; none where the key is null."""
        value = self.get(key)
        if value is None:
            return []
        whole = isinstance(value, list) and all(type(place) is int for place in value)
        if not whole or not {*value} <= {*range(blocks)}:
            self.refuse(key, f"numbers of blocks, from 0 to {blocks - 1}")
        return list(value)

    def name(self) -> str:
        """What the config calls the model, if anything."""
        names = (self.config.get(key) for key in ("_name_or_path", "name"))
        return next((name for name in names if isinstance(name, str) and name), "")

    def refuse(self, key: str, supported: str) -> None:
        """Stop: `key` has a value that cannot be represented."""
        raise RefusedError(
            f"{self._place(key)} is {quoted(self.get(key))}, which is not supported "
            f"for model_type {quoted(self.config['model_type'])}; supported: {supported}"
        )

    def _value(self, key: str, otherwise: object = None) -> Any:
        return self.config.get(key, self.defaults.get(key, otherwise))

    def _wrong(self, key: str, value: object, wanted: str) -> InputError:
        return InputError(
            f"{self._place(key)} is {quoted(value)}, which must be {wanted}; correct it"
        )

    def _place(self, key: str) -> str:
        name = self.names.get(key, key)
        line = f":{self.lines[name]}" if name in self.lines else ""
        return f"{self.where}{line}: `{name}`"
