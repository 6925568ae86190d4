"""The cost model's tables of constants and of frameworks say what the code has."""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import bigplan.cost.framework as frameworks

PAGE = (Path(__file__).parent.parent.parent / "docs" / "cost-model.md").read_text()
UNITS = {"%": 0.01, "GiB": 2**30, "MiB": 2**20, "Mi": 2**20, "GB/s": 1e9}


def rows(first: str) -> list[list[str]]:
    """Cells of the rows below a table's head that begins so, the head first."""
    lines = PAGE[PAGE.index(f"| {first}") :].split("\n\n")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [table[0], *table[2:]]


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a constant, in order."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple):
        for each in value:
            yield from numbers(each)
    else:
        yield float(value)


def found(name: str) -> tuple[Any, Any]:
    """What `module.NAME` is in the package, and its module."""
    path, _, last = name.strip("`").rpartition(".")
    module = importlib.import_module(f"bigplan.{path}")
    return getattr(module, last), module


@pytest.mark.parametrize("row", rows("constant")[1:], ids=lambda row: row[0])
def test_a_constant_is_as_the_page_has_it(row: list[str]) -> None:
    name, shown, unit, source, user = row
    value, module = found(name)
    factor = UNITS.get(unit.partition(" ")[0].strip(":"), 1.0)
    stated = [factor * float(each) for each in shown.split(", ")]
    assert stated == pytest.approx(list(numbers(value)), rel=5e-4)
    assert source
    used = user.strip("` ")
    place = getattr(module, used) if hasattr(module, used) else _named(used)
    if not isinstance(place, frameworks.Framework):
        assert name.strip("`").rpartition(".")[2] in inspect.getsource(place)


def _named(used: str) -> Any:
    """A function by its module's name in the package, or a module."""
    try:
        return importlib.import_module(f"bigplan.{used}")
    except ModuleNotFoundError:
        return found(used)[0]


def test_frameworks_are_as_the_page_has_them() -> None:
    head, *table = rows("field of")
    for row in table:
        field = row[0].split("`")[1]
        for name, cell in zip(head[1:], row[1:], strict=True):
            stated = float(cell.strip(" |").removesuffix("\\*"))
            assert getattr(getattr(frameworks, name.strip(" |")), field) == stated, (field, name)
