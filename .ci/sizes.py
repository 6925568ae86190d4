"""Prints in one line the largest file, function, class and argument list under bigplan/.

It never fails: the figures are for the reader. Kernels are exempt: their shape is the hardware's.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "bigplan"


class Size(NamedTuple):
    """How large the thing called `name` is."""

    amount: int
    name: str


FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> Iterator[tuple[str, str]]:
    """Yield every file's name, relative to the repository, with its text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "kernels" not in path.relative_to(PACKAGE).parts:
            yield str(path.relative_to(PACKAGE.parent)), path.read_text(encoding="utf-8")


def arguments(function: FunctionNode) -> int:
    """Count a function's arguments, without self and cls."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    stars = [star for star in (given.vararg, given.kwarg) if star]
    return sum(argument.arg not in ("self", "cls") for argument in named) + len(stars)


def main() -> None:
    """Measure and print."""
    none = Size(0, "none")
    files, functions, classes, lists = [none], [none], [none], [none]
    for path, text in sources():
        files.append(Size(len(text.splitlines()), path))
        for node in ast.walk(ast.parse(text, path)):
            if isinstance(node, FunctionNode):
                name = f"{path}:{node.name}"
                functions.append(Size((node.end_lineno or node.lineno) - node.lineno + 1, name))
                lists.append(Size(arguments(node), name))
            elif isinstance(node, ast.ClassDef):
                methods = sum(isinstance(child, FunctionNode) for child in node.body)
                classes.append(Size(methods, f"{path}:{node.name}"))
    file, function, class_, most = max(files), max(functions), max(classes), max(lists)
    print(
        f"largest: file {file.amount} lines ({file.name}), "
        f"function {function.amount} lines ({function.name}), "
        f"class {class_.amount} methods ({class_.name}), "
        f"argument list {most.amount} ({most.name})"
    )


if __name__ == "__main__":
    main()
