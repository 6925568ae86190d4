"""Keys and values of another tool's file, read by name; unread keys are reported."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bigplan.errors import InputError, quoted
from bigplan.spec.files.words import did_you_mean
from bigplan.spec.unplanned import unplanned

AUTO = "auto"  # left to the command line, or to what starts the tool
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(slots=True)
class Section:
    """A mapping of the file, `name` in messages; a value of "auto" counts as absent."""

    data: Mapping[str, Any]
    file: str
    name: str = ""
    seen: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, data: object, file: str, name: str = "") -> Section:
        """A section from data. Raises InputError where it is not a mapping."""
        if not isinstance(data, Mapping):
            where = f"{file}: {name}" if name else file
            raise InputError(
                f"{where} is {quoted(data)}, which must be keys and values; check that it is the "
                "file you mean"
            )
        return cls(data, file, name)

    def path(self, key: str) -> str:
        """The key's path, as the user finds it."""
        return f"{self.name}.{key}" if self.name else key

    def wrong(self, key: str, rule: str) -> InputError:
        """The error for a value that breaks the rule."""
        return InputError(
            f"{self.file}: {self.path(key)} is {quoted(self.data[key])}, {rule}; correct it"
        )

    def is_auto(self, key: str) -> bool:
        """Whether the file says "auto"."""
        self.seen.add(key)
        return self.data.get(key) == AUTO

    def _value(self, key: str) -> Any:
        self.seen.add(key)
        value = self.data.get(key)
        return None if value == AUTO else value

    def part(self, key: str) -> Section | None:
        """The section under a key; None: absent or null."""
        value = self._value(key)
        return None if value is None else Section.of(value, self.file, self.path(key))

    def number(self, key: str, least: float = 0.0) -> float | None:
        """A number, also a quoted one, as YAML files have it."""
        value = self._value(key)
        if value is None:
            return None
        try:
            found = None if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            found = None
        if found is None:
            raise self.wrong(key, "which must be a number")
        if not least <= found < float("inf"):
            raise self.wrong(key, f"which must be at least {least:g}")
        return found

    def whole(self, key: str, least: int = 0) -> int | None:
        """A whole number; 5e8 is one."""
        found = self.number(key, least)
        if found is not None and not found.is_integer():
            raise self.wrong(key, "which must be a whole number")
        return None if found is None else int(found)

    def flag(self, key: str) -> bool | None:
        """True or false, also as a word."""
        value = self._value(key)
        if isinstance(value, str) and value.lower() in _WORDS:
            return _WORDS[value.lower()]
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(key, "which must be true or false")

    def text(self, key: str, known: Collection[str] = ()) -> str | None:
        """A word, which must be one of `known` if there are any."""
        value = self._value(key)
        if value is None:
            return None
        word = str(value).lower() if isinstance(value, bool) else value
        if not isinstance(word, str | int):
            raise self.wrong(key, "which must be text")
        if known and str(word) not in known:
            raise self.wrong(key, f"which must be one of {', '.join(known)}")
        return str(word)

    def left(self, harmless: Collection[str]) -> Iterator[str]:
        """Unread keys that may matter, each told as unknown.

        Raises InputError for features that are not planned.
        """
        for key, value in self.data.items():
            if key in self.seen or key in harmless:
                continue
            if (refusal := unplanned(key)) and value not in (None, False, 0, 1, {}, []):
                raise InputError(f"{self.file}: {self.path(key)} is {quoted(value)}: {refusal}")
            known = self.seen.union(harmless)
            yield f"{self.path(key)}: bigplan does not know it{did_you_mean(key, known)}"

    def without_effect(self, harmless: Collection[str]) -> Iterator[str]:
        """Keys that change neither time nor memory."""
        return (self.path(key) for key in self.data if key in harmless and key not in self.seen)
