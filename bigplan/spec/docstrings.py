"""What a description's fields mean: the strings that stand below them in the source.

pydantic would read them when the classes are made, and so each time any command starts: that takes
a tenth of the time of planning for one machine. Errors and `bigplan schema` ask here instead.
"""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise

from pydantic import BaseModel


def docstrings(described: type[BaseModel]) -> dict[str, str]:
    """The strings below the fields of a class and of its bases, by field."""
    found: dict[str, str] = {}
    for cls in reversed(described.__mro__[: described.__mro__.index(BaseModel)]):
        found |= _below_fields(cls)
    return found


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
