"""Options from a shell script, or from a list with one argument a line. Nothing is run.

The script's own variables are substituted. Every branch of a condition counts. Of an option given
twice the last counts.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from bigplan.errors import InputError, quoted

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([\w\s*/+-]{1,100})\)\)")
_OPTION = re.compile(r"--?[A-Za-z]")
_ENDS = {"(", ")", ";", "|", "&", "&&", "||", "fi", "then", "else", "done"}
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(slots=True)
class ArgumentLines:
    """Long options by name without dashes, with their values; it records which were read."""

    options: Mapping[str, list[str]]
    file: str
    seen: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, text: str, file: str) -> ArgumentLines:
        """Parse a script. Raises InputError where quotes do not end, or there are no options."""
        try:
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError as error:
            raise InputError(f"{file}: not a shell script: {error}; correct its quotes") from None
        options: dict[str, list[str]] = {}
        values: list[str] | None = None
        for word in _expanded(words):
            if word.startswith("--") and _OPTION.match(word):
                name, equals, value = word[2:].partition("=")
                values = [value] if equals else []
                options[name.replace("_", "-")] = values
            elif word in _ENDS or word.endswith(".py"):
                values = None
            elif values is not None:
                values.append(word)
        if not options:
            raise InputError(
                f"{file}: there is no --option in it; name the script that starts the training, or "
                "a file with one argument a line"
            )
        return cls(options, file)

    def flag(self, *names: str) -> bool:
        """Whether any of these options is given; all count as read."""
        self.seen.update(names)
        return any(name in self.options for name in names)

    def text(self, name: str, *known: str) -> str | None:
        """The option's value, which must be one of `known` if there are any; None: not given."""
        self.seen.add(name)
        if name not in self.options:
            return None
        values = self.options[name]
        if not values:
            raise InputError(f"{self.file}: --{name} has no value; write one")
        if "$" in values[0]:
            raise InputError(
                f"{self.file}: --{name} is {quoted(values[0])}, which the script takes from "
                "elsewhere; write its value into the file"
            )
        if known and values[0] not in known:
            raise InputError(
                f"{self.file}: --{name} is {quoted(values[0])}, which must be one of "
                f"{', '.join(known)}; correct it"
            )
        return values[0]

    def number(self, name: str) -> float | None:
        """A number."""
        text = self.text(name)
        if text is None:
            return None
        try:
            found = float(text)
        except ValueError:
            found = -1.0
        if not 0 <= found < float("inf"):
            raise InputError(
                f"{self.file}: --{name} is {quoted(text)}, which must be a number of at least 0; "
                "correct it"
            )
        return found

    def whole(self, name: str, default: int | None = None) -> int | None:
        """A whole number, one at least."""
        found = self.number(name)
        if found is None:
            return default
        if not found.is_integer() or found < 1:
            raise InputError(
                f"{self.file}: --{name} is {self.options[name][0]}, which must be a whole number "
                "of at least 1; correct it"
            )
        return int(found)

    def known_whole(self, name: str) -> int | None:
        """A whole number, where the file has a literal one."""
        values = self.options.get(name, [])
        self.seen.add(name)
        return int(values[0]) if values and values[0].isdecimal() and len(values[0]) < 10 else None


def _expanded(words: list[str]) -> Iterator[str]:
    """Words with the script's variables substituted, split into single options."""
    variables: dict[str, str] = {}
    pending = list(reversed(words))
    while pending:
        word = pending.pop()
        if assigned := _ASSIGNMENT.fullmatch(word):
            name, value = assigned[1], assigned[2]
            if value.startswith("("):  # an array, whose words follow
                pending += [rest] if (rest := value[1:]) else []
                pending.append("(")
            elif "--" in value and " " in value:
                pending += reversed(_substituted(value, variables).split())
            else:
                variables[name] = _substituted(value, variables)
            continue
        if word.startswith("--") and any(c.isspace() for c in word):
            pending += reversed(_substituted(word, variables).split())
            continue
        text = _substituted(word, variables)
        if len(text) > 1 and text.endswith(")") and "(" not in text:
            pending.append(")")
            text = text[:-1]
        if text.startswith("(") and len(text) > 1:
            text = text[1:]
        yield text.strip("'\"") if text.startswith("--") else text


def _substituted(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, match[0] if default is None else default.strip("\"'"))

    def computed(match: re.Match[str]) -> str:
        # In arithmetic a variable needs no dollar.
        inner = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
        return _computed(inner, match[0])

    return _ARITHMETIC.sub(computed, _VARIABLE.sub(value, text))


def _computed(text: str, otherwise: str) -> str:
    try:
        found = _number(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return otherwise
    return str(found)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError(ast.dump(node))
