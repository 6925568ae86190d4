"""Parts of a family: some fields of ModelSpec, and the keys of a config.json that tell them.

A part reads the fields, writes the keys, and says which key each field has, for messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bigplan.spec.hf.reader import ConfigReader
from bigplan.spec.model import ModelSpec


def _nothing(source: object) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Part:
    """Fields that a family reads, keys that it writes, and the keys by field (ModelFamily.keys)."""

    read: Callable[[ConfigReader], dict[str, Any]] = _nothing
    write: Callable[[ModelSpec], dict[str, Any]] = _nothing
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def joined(*parts: Part) -> Part:
    """The parts one after the other; of what several say, the last counts."""
    return Part(
        lambda reader: {key: value for part in parts for key, value in part.read(reader).items()},
        lambda model: {key: value for part in parts for key, value in part.write(model).items()},
        {name: keys for part in parts for name, keys in part.keys.items()},
    )


def _told(read: Callable[[ConfigReader, str], Any], keys: Mapping[str, str]) -> Part:
    return Part(
        lambda reader: {name: read(reader, key) for name, key in keys.items()},
        lambda model: {key: getattr(model, name) for name, key in keys.items()},
        {name: (key,) for name, key in keys.items()},
    )


def counts(**keys: str) -> Part:
    """Whole numbers, by field of ModelSpec the key that has each."""
    return _told(ConfigReader.count, keys)


def optional_counts(**keys: str) -> Part:
    """Whole numbers that may be null."""
    return _told(ConfigReader.optional_count, keys)


def numbers(**keys: str) -> Part:
    """Numbers above 0."""
    return _told(ConfigReader.number, keys)


def flags(**keys: str) -> Part:
    """True or false; where fields share a key, the last one is written."""
    return _told(ConfigReader.flag, keys)


def values(**keys: str) -> Part:
    """What ModelSpec itself checks."""
    return _told(ConfigReader.get, keys)


def always(**fields: Any) -> Part:
    """Fields that no key tells."""
    return Part(lambda reader: dict(fields))


def written(keys: Mapping[str, Any]) -> Part:
    """Keys that are the same in all files, and not read."""
    return Part(write=lambda model: dict(keys))


def only(key: str, supported: str, known: Callable[[ConfigReader], bool]) -> Part:
    """A key whose value is refused where it is not `known`; `supported`: what is, in words."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        if not known(reader):
            reader.refuse(key, supported)
        return {}

    return Part(read)


def off(key: str, supported: str = "false") -> Part:
    """A switch that must be off."""
    return only(key, supported, lambda reader: not reader.flag(key))


def on(key: str, supported: str) -> Part:
    """A switch that must be on."""
    return only(key, supported, lambda reader: reader.flag(key))


def words(key: str, *known: str) -> Part:
    """A text that must be one of these."""
    return only(key, " or ".join(known), lambda reader: reader.text(key) in known)


def unset(key: str, supported: str) -> Part:
    """A value that must be null."""
    return only(key, supported, lambda reader: reader.get(key) is None)


def empty(key: str, supported: str) -> Part:
    """A value that must be null, 0 or have nothing in it."""
    return only(key, supported, lambda reader: not reader.get(key))


def activation(key: str, words: Mapping[str, str], usual: str) -> Part:
    """ModelSpec.mlp by the words of a key; `usual`: what is written where it is no such word."""

    def read(reader: ConfigReader) -> dict[str, Any]:
        word = reader.text(key)
        if word not in words:
            reader.refuse(key, ", ".join(words))
        return {"mlp": words[word]}

    return Part(
        read, lambda model: {key: model.mlp if words.get(model.mlp) == model.mlp else usual}
    )


def inner_width(key: str, hidden: str) -> Part:
    """Columns of the MLP, four times those of `hidden` where the key is null or absent."""
    return Part(
        lambda reader: {"ffn": reader.optional_count(key) or 4 * reader.count(hidden)},
        lambda model: {key: model.ffn},
        {"ffn": (key,)},
    )


BIASES = always(qkv_bias=True, attention_output_bias=True, mlp_bias=True)


def renamed(part: Part, names: Mapping[str, str]) -> Part:
    """The part, with `names` of keys in a family's files by those that the part knows."""

    def write(model: ModelSpec) -> dict[str, Any]:
        return {names.get(key, key): value for key, value in part.write(model).items()}

    keys = {name: tuple(names.get(key, key) for key in of) for name, of in part.keys.items()}
    return Part(lambda reader: part.read(reader.renamed(names)), write, keys)
