"""Strict YAML: every problem is reported with file, line, rule and remedy.

The text is composed to YAML nodes first, so that each value still knows its line; the plain data
is then validated by pydantic (as JSON: a list may become a tuple, but "3" never a number).
Scalars follow YAML 1.2: `1e-4` is a float, `on` and `1:30` are text, `010` is ten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from bigplan.errors import InputError, control_character, quoted, shortened
from bigplan.spec.files.problems import (
    MOST_PROBLEMS,
    DocumentProblem,
    KeyPath,
    describe,
    problem_at,
)
from bigplan.spec.files.reading import DEEPEST, DESCRIPTION, TOO_DEEP, number_problem, read_text
from bigplan.spec.files.writing import write_whole


def _hashable(value: object) -> Hashable:
    if isinstance(value, Mapping):
        return tuple((key, _hashable(value[key])) for key in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    assert isinstance(value, Hashable)
    return value


class Spec(BaseModel):
    """Base of all descriptions: frozen, hashable, unknown keys forbidden."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def __hash__(self) -> int:
        values = (_hashable(getattr(self, name)) for name in type(self).model_fields)
        return hash((type(self), *values))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, without cached results of the old ones."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def implausible(self) -> Iterator[tuple[KeyPath, str]]:
        """Places in a document with values that cannot be meant, and what is wrong there.

        This is asked of users' files when they are read; code may build any legal value.
        """
        yield from ()


LONGEST_NAME = 500
"""characters of what tables and messages repeat"""
S = TypeVar("S", bound=BaseModel)

_VALUE = 16  # counted for each value besides its own characters: key, indent, line
MOST_NODES = DESCRIPTION // _VALUE
TOO_MANY = f"more than {MOST_NODES} values, and no such file has so many"


class _Bounded(yaml.composer.Composer):
    """A composer with an end to nesting and numbers.

    A node takes up to 700 bytes of memory, and 16 MiB of text can have eight million.
    """

    _depth = 0
    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As Composer's method, which calls itself for every level."""
        self._depth += 1
        self._nodes += 1
        if self._depth > DEEPEST or self._nodes > MOST_NODES:
            problem = TOO_DEEP if self._depth > DEEPEST else TOO_MANY
            parser: Any = self
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=parser.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Loader(_Bounded, yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2's core schema."""


if yaml.__with_libyaml__:

    class _CLoader(_Bounded, yaml.CSafeLoader):
        """The same with the parser in C, which takes a fifth of the time."""

        def __init__(self, text: str) -> None:
            yaml.CSafeLoader.__init__(self, text)
            _Bounded.__init__(self)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text which `_Loader`, but not YAML 1.1, takes for a number."""


_READERS = (_Loader, _CLoader) if yaml.__with_libyaml__ else (_Loader,)
for _reader in _READERS:
    _reader.yaml_implicit_resolvers = {}  # Those of YAML 1.1 would be inherited.

for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+(?:_[0-9]+)*", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.nan",
        list("-+.0123456789"),
    ),
):
    for _reader in (*_READERS, _Dumper):
        _reader.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first
        )


def dump_document(data: object) -> str:
    """Data as YAML that `load_document` reads back unchanged."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def load_document(path: Path, schema: type[S]) -> S:
    """Read, parse and validate a YAML file. Raises InputError that lists every problem."""
    return parse_document(read_text(path), schema, str(path))


def parse_document(text: str, schema: type[S], name: str = "<text>") -> S:
    """Parse and validate YAML text; `name` stands for the file in messages."""
    data, root = load_data(text, name)
    return validate_nodes(data, root, schema, name)


def validate(data: object, schema: type[S], where: str) -> S:
    """Validate plain data (as parsed from YAML or JSON) that came from `where`.

    Raises ProblemsError.
    """
    return validate_nodes(data, None, schema, where)


def write_text(path: Path, text: str, noun: str) -> None:
    """Write the text of a `noun` as UTF-8. Raises InputError where it cannot be written."""
    write_bytes(path, text.encode(), noun)


def write_bytes(path: Path, data: bytes, noun: str) -> None:
    """Write the bytes of a `noun`, all or none. Raises InputError where they cannot be written."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise InputError(
            f"cannot write the {noun} to {path}: {error.strerror}; name another file, "
            "or make it one that can be written"
        ) from None


def load_data(text: str, name: str = "<text>") -> tuple[Any, yaml.Node | None]:
    """Plain data and the node tree that knows its lines. Raises InputError."""
    try:
        root = _composed(text)
        problems: list[DocumentProblem] = []
        data = None if root is None else _DataBuilder(problems).build(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise InputError(
            f"{name}:{line}: not YAML: {shortened(error.problem or error.context or '')}; "
            "check indentation, quotes and colons near this line"
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(
            f"{name}:{line}: not YAML: it holds the character {chr(error.character)!r}, which is "
            "no text; remove it"
        ) from None
    if problems:
        raise ProblemsError(problems, name)
    return data, root


# The parser in C takes tabs, question marks and a comment right behind a block's sign where the one
# in Python does not, and others for other than it. Of 77,000 ASCII texts at random without these
# both made the same, but for the line of an empty value in four. A percent sign behind a digit
# begins nothing: of 106,000 texts with such, which all plans and most clusters have, both made the
# same.
_READ_OTHERWISE = re.compile(r"[\t?!\0\x7f]|(?<![0-9])%|[|>][-+0-9]*#")


def _composed(text: str) -> yaml.Node | None:
    """The node tree. Raises YAMLError: what is no YAML is told by the parser in Python."""
    if yaml.__with_libyaml__ and text.isascii() and not _READ_OTHERWISE.search(text):
        try:
            return _CLoader(text).get_single_node()
        except yaml.YAMLError:
            pass
    return _Loader(text).get_single_node()


class _DataBuilder:
    """Nodes to plain data; duplicate keys and odd constructs become problems.

    Every alias is written out, as readers of the data would do, so the total size is bounded.
    """

    def __init__(self, problems: list[DocumentProblem]) -> None:
        self._problems = problems
        self._open: set[int] = set()
        self._left = DESCRIPTION

    def build(self, node: yaml.Node) -> Any:
        key = id(node)
        if key in self._open:
            self._complain(node, "an alias that contains itself; write the value out")
            return None
        self._open.add(key)
        self._count(node)
        value: Any
        if isinstance(node, yaml.MappingNode):
            value = self._mapping(node)
        elif isinstance(node, yaml.SequenceNode):
            value = [self.build(item) for item in node.value]
        else:
            value = self._scalar(node)
        self._open.discard(key)
        return value

    def _count(self, node: yaml.Node) -> None:
        self._left -= _VALUE + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        if self._left < 0 or len(self._open) > DEEPEST:
            raise yaml.MarkedYAMLError(
                problem="with its aliases written out the text is too large or nested too deeply",
                problem_mark=node.start_mark,
            )

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
                self._complain(key_node, "keys must be plain words")
                continue
            key = key_node.value
            if key == "<<" and not key_node.style:
                self._complain(
                    key_node,
                    "merging with `<<` is not supported; write the keys out, or give a whole "
                    "value an anchor and an alias",
                )
                continue
            if key in result:
                self._complain(
                    key_node,
                    f"duplicate key {quoted(key)} (first on line {first_line[key]}); remove one",
                )
                continue
            first_line[key] = key_node.start_mark.line + 1
            result[key] = self.build(value_node)
        return result

    def _scalar(self, node: yaml.Node) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        text = node.value
        if kind == "null":
            return None
        if kind == "bool" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind == "str":
            return text
        if kind in ("int", "float") and (problem := number_problem(text)):
            self._complain(node, problem)
            return None
        try:
            if kind == "int":
                return int(text)
            if kind == "float":
                return float(text.replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            pass  # An explicit tag such as `!!int abc`: reported below.
        self._complain(node, f"{quoted(text)} has the tag {quoted(node.tag)}; write a plain value")
        return None

    def _complain(self, node: yaml.Node, text: str) -> None:
        self._problems.append(DocumentProblem(node.start_mark.line + 1, text))


class ProblemsError(InputError):
    """All that is wrong with a document."""

    def __init__(self, problems: list[DocumentProblem], where: str) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line or 0))
        told = [f"{where}{problem}" for problem in self.problems[:MOST_PROBLEMS]]
        if len(self.problems) > MOST_PROBLEMS:
            told.append(f"{where}: more is wrong than these {MOST_PROBLEMS}; correct them first")
        super().__init__("\n".join(told))


def validate_nodes(data: object, root: yaml.Node | None, schema: type[S], where: str) -> S:
    """Validate data, taking lines from `root`, the nodes that it was built from (if any)."""
    line = 1 if root is not None else None
    if not isinstance(data, Mapping):
        got = "nothing" if data is None else quoted(data)
        keys = ", ".join(schema.model_fields)
        problem = DocumentProblem(line, f"expected keys and values, got {got}; keys: {keys}")
        raise ProblemsError([problem], where)
    text = json.dumps(data)
    if _ESCAPED.search(text):
        problems = [problem_at(path, told, root) for path, told in _control_characters(data)]
        if problems:
            raise ProblemsError(problems, where)
    try:
        found = schema.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ProblemsError(describe(error, schema, data, root), where) from None
    if isinstance(found, Spec):
        problems = [problem_at(path, text, root) for path, text in found.implausible()]
        if problems:
            raise ProblemsError(problems, where)
    return found


# Control characters as JSON escapes them. This also matches a backslash before `u00`, so matches
# are checked again.
_ESCAPED = re.compile(r"\\u00[0189]|\\[bfr]|\x7f")


def _control_characters(data: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Places whose text holds characters that a terminal takes as commands."""
    if isinstance(data, str):
        if (found := control_character(data)) is not None:
            yield path, f"is {quoted(data)}, which holds the control character {found!r}; remove it"
    elif isinstance(data, Mapping):
        for key, value in data.items():
            if (found := control_character(key)) is not None:
                yield path, f"has the key {quoted(key)} with the control character {found!r}"
            yield from _control_characters(value, (*path, key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _control_characters(value, (*path, index))


def parse_scalar(text: str) -> Any:
    """The value that `text` would have in a YAML document: '512' -> 512, 'bf16' -> 'bf16'."""
    return load_data(text, "<value>")[0]


def set_path(data: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of `data` with the dotted `path` set; text is read as YAML.

    `set_path({}, "training.global_batch", "512")` is {"training": {"global_batch": 512}}.
    Raises InputError where the path leads through a value that is not a mapping.
    """
    first, _, rest = path.partition(".")
    if not first:
        raise InputError(f"{quoted(path)} is not a key; write names joined by dots, such as 'a.b'")
    copy = dict(data)
    if not rest:
        copy[first] = parse_scalar(value) if isinstance(value, str) else value
        return copy
    inner = copy.get(first)
    if inner is not None and not isinstance(inner, Mapping):
        raise InputError(
            f"{path!r}: {first!r} is {quoted(inner)}, which holds no keys; set it whole"
        )
    copy[first] = set_path(inner or {}, rest, value)
    return copy
