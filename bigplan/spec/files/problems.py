"""pydantic's errors in the words of the user: line, key, value, rule, remedy."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bigplan.errors import quoted
from bigplan.spec.files.words import LONGEST_WORD, did_you_mean, translated
from bigplan.spec.unplanned import unplanned

KeyPath = tuple[str | int, ...]

MOST_PROBLEMS = 20
"""told of one document; nobody reads more at once"""


@dataclass(frozen=True)
class DocumentProblem:
    """One thing that is wrong, the line (from 1) where it stands, if it is known, and its path.

    The text has names of keys in backticks.
    """

    line: int | None
    text: str
    path: KeyPath = ()

    def __str__(self) -> str:
        return f": {self.text}" if self.line is None else f":{self.line}: {self.text}"


def problem_at(path: KeyPath, text: str, root: yaml.Node | None) -> DocumentProblem:
    """A problem with the value at `path`, with its line where `root` is given."""
    return DocumentProblem(_line(root, path), f"{_name(path)} {text}", path)


def describe(
    error: ValidationError,
    schema: type[BaseModel],
    data: Mapping[str, Any],
    root: yaml.Node | None,
) -> list[DocumentProblem]:
    """The problems in `error`, with lines where `root` (the YAML nodes of `data`) is given."""
    found: dict[KeyPath, list[str]] = {}
    listed: dict[KeyPath, KeyPath] = {}  # mappings, each with the key whose problem tells all keys
    # A union's alternatives may report the same value, so more errors are read than are told.
    for details in error.errors(include_url=False)[: 5 * MOST_PROBLEMS]:
        if details["type"] == "default_factory_not_called":
            continue  # The field it depends on is reported already.
        path, value = _locate(details["loc"], data, details["type"] == "missing")
        if details["type"] == "too_short" and len(value) >= details["ctx"]["min_length"]:
            continue  # pydantic counts only the valid items; other errors report the invalid ones
        text = _text(details, path, value, schema)
        if text.startswith(_UNKNOWN) and listed.setdefault(path[:-1], path) == path:
            text += f" (allowed: {', '.join(_allowed(details, path, schema))})"
        texts = found.setdefault(path, [])
        if text not in texts:
            texts.append(text)
    # Of a union's alternatives, the user meant the one that got furthest into the value.
    return [
        DocumentProblem(_line(root, at := path or _named(texts)), _either(texts), at)
        for path, texts in found.items()
        if not any(other != path and other[: len(path)] == path for other in found)
        or not _is_type_clash(texts)
    ]


_UNKNOWN = "unknown key"
_NAMED = re.compile(r"`(\w+)`")


def _named(texts: list[str]) -> KeyPath:
    """The key that a rule about several of a document's keys names first."""
    found = _NAMED.match(texts[0])
    return (found[1],) if found else ()


_TYPE_CLASH = "which must be"


def _is_type_clash(texts: list[str]) -> bool:
    return all(_TYPE_CLASH in text for text in texts)


def _either(texts: list[str]) -> str:
    """One text of what each of a union's alternatives finds wrong with a value."""
    split = [text.partition(f"{_TYPE_CLASH} ") for text in texts]
    if len({head for head, _, _ in split}) == 1 and _is_type_clash(texts):
        return "".join(split[0][:2]) + " or ".join(tail for _, _, tail in split)
    return " (or: ".join(texts) + ")" * (len(texts) - 1)


def _locate(loc: KeyPath, data: Any, missing: bool) -> tuple[KeyPath, Any]:
    """`loc` without the names of union members that pydantic mixes in, and its value."""
    path: list[str | int] = []
    last = len(loc) - 1
    for index, part in enumerate(loc):
        if _holds(data, part):
            data = data[part]
        elif not (missing and index == last):
            continue
        path.append(part)
    return tuple(path), data


def _holds(data: Any, part: str | int) -> bool:
    if isinstance(data, Mapping):
        return part in data
    return isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)


def _line(root: yaml.Node | None, path: KeyPath) -> int | None:
    """Line of the deepest key on `path` that exists."""
    if root is None:
        return None
    line, node = root.start_mark.line, root
    for part in path:
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == part), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line
    return line + 1


def _is_unknown(details: ErrorDetails) -> bool:
    """Whether a key is the problem, of a mapping or of a dictionary with keys of a Literal."""
    bad_key = details["loc"][-1:] == ("[key]",) and details["type"] == "literal_error"
    return bad_key or details["type"] == "extra_forbidden"


def _allowed(details: ErrorDetails, path: KeyPath, schema: type[BaseModel]) -> list[str]:
    """The keys that may stand beside an unknown one."""
    extra = details["type"] == "extra_forbidden"
    return _fields_at(schema, path[:-1]) if extra else _expected(details)


def _text(details: ErrorDetails, path: KeyPath, value: Any, schema: type[BaseModel]) -> str:
    kind = details["type"]
    if _is_unknown(details):
        word, allowed = str(path[-1]), _allowed(details, path, schema)
        own = kind != "extra_forbidden" or translated(word, allowed)
        if not own and (refusal := unplanned(word)):
            return f"{_name(path)}: {refusal}"
        below = _below(schema, path[:-1]) if kind == "extra_forbidden" else ()
        hint = did_you_mean(word, allowed, below)
        return f"{_UNKNOWN} {quoted(path[-1])}{_inside(path)}{hint}"
    if kind == "missing":
        return f"missing key {path[-1]!r}{_inside(path)}; add `{path[-1]}: ...`" + _about(
            schema, path
        )
    if kind == "value_error":
        rule = str(details["ctx"]["error"])
        return f"{_name(path)}: {rule}" if path else rule
    shown = "a list" if isinstance(value, list) else quoted(value)
    shown = "a mapping" if isinstance(value, Mapping) else shown
    return f"{_name(path)} is {shown}, {_rule(details, value)}{_about(schema, path)}"


def _name(path: KeyPath) -> str:
    if not path:
        return "the document"
    name = ".".join(map(str, path))
    return f"`{name}`" if len(name) <= LONGEST_WORD else quoted(name)


def _inside(path: KeyPath) -> str:
    return f" in {_name(path[:-1])}" if len(path) > 1 else ""


def _about(schema: type[BaseModel], path: KeyPath) -> str:
    """The documentation of the field at `path`, which says what to write."""
    if not path:
        return ""
    texts = (docstrings(model).get(str(path[-1])) for model in _models_at(schema, path[:-1]))
    text = next(filter(None, texts), "")
    parts = (" ".join(part.split()).rstrip(".") for part in text.split("\n\n"))
    return f" ({'. '.join(parts)})" if text else ""


_RULES = {
    "int_type": f"{_TYPE_CLASH} a whole number",
    "int_from_float": f"{_TYPE_CLASH} a whole number",
    "float_type": f"{_TYPE_CLASH} a number",
    "string_type": f"{_TYPE_CLASH} text (put it in quotes)",
    "bool_type": f"{_TYPE_CLASH} true or false",
    "model_type": f"{_TYPE_CLASH} keys and values",
    "dict_type": f"{_TYPE_CLASH} keys and values",
    "list_type": f"{_TYPE_CLASH} a list",
    "tuple_type": f"{_TYPE_CLASH} a list",
    "none_required": f"{_TYPE_CLASH} null",
    "too_short": "which is too short: give at least {min_length}",
    "string_too_long": "which is too long: give at most {max_length} characters",
    "finite_number": f"{_TYPE_CLASH} a finite number",
    "greater_than": f"{_TYPE_CLASH} greater than {{gt}}",
    "greater_than_equal": f"{_TYPE_CLASH} at least {{ge}}",
    "less_than": f"{_TYPE_CLASH} less than {{lt}}",
    "less_than_equal": f"{_TYPE_CLASH} at most {{le}}",
}


_THOUSANDS = re.compile(r"\d+(\.\d+)?\s*[kK]i?")


def _rule(details: ErrorDetails, value: Any) -> str:
    context = details.get("ctx", {})
    if details["type"] == "literal_error":
        known = _expected(details)
        return f"{_TYPE_CLASH} one of {', '.join(known)}{did_you_mean(str(value), known)}"
    if details["type"] == "int_type" and isinstance(value, str) and _THOUSANDS.fullmatch(value):
        # A length of 8k is 8192 to most users, while 64k of `tokens` are 64,000 in these files.
        return f"{_TYPE_CLASH} a whole number, written out: 1k may be 1000 or 1024"
    rule = _RULES.get(details["type"])
    return rule.format(**context) if rule else f"but: {details['msg']}"


def _expected(details: ErrorDetails) -> list[str]:
    """The values of a Literal, from pydantic's "'a', 'b' or 'c'"."""
    expected = str(details["ctx"]["expected"])
    return [word.strip().strip("'") for word in expected.replace(" or ", ", ").split(",")]


def _fields_at(schema: type[BaseModel], path: KeyPath) -> list[str]:
    """The fields that a mapping at `path` may have (of every model that may stand there)."""
    models = _models_at(schema, path)
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def _below(schema: type[BaseModel], path: KeyPath) -> Iterator[str]:
    """Keys of the mappings in a mapping at `path`, and those of the mappings in these."""
    inside = [(name, (*path, name)) for name in _fields_at(schema, path)]
    for _ in range(2):
        deeper = [
            (f"{dotted}.{name}", (*at, name))
            for dotted, at in inside
            for name in _fields_at(schema, at)
        ]
        yield from (dotted for dotted, _ in deeper)
        inside = deeper


def _models_at(schema: type[BaseModel], path: KeyPath) -> list[type[BaseModel]]:
    """The models that a mapping at `path` may be."""
    models: list[type[BaseModel]] = [schema]
    annotations: list[Any] = []
    for part in path:
        annotations = [
            model.model_fields[part].annotation
            for model in models
            if isinstance(part, str) and part in model.model_fields
        ] or annotations
        models = [model for annotation in annotations for model in models_in(annotation)]
    return models


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models in an annotation: through unions, lists and dictionaries."""
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def docstrings(described: type[BaseModel]) -> dict[str, str]:
    """The strings below the fields of a class and of its bases, by field."""
    found: dict[str, str] = {}
    for cls in reversed(described.__mro__[: described.__mro__.index(BaseModel)]):
        # Of Link[...], which pydantic makes of Link, there is no text.
        if issubclass(cls, BaseModel) and cls.__pydantic_generic_metadata__["origin"] is None:
            found |= _below_fields(cls)
    return found


@cache  # to find and parse a class's text takes 10 to 20 ms
def _below_fields(cls: type) -> dict[str, str]:
    (tree,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in pairwise(tree.body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = inspect.cleandoc(text)
    return found
