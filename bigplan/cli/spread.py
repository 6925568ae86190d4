"""Options of a command as one dataclass; its fields become options that typer understands."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from functools import wraps
from typing import Annotated, Any, TypeVar

from bigplan.cli.option import OPTION

O = TypeVar("O")  # noqa: E741 -- the options of one command


def takes(options: type[O]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command's `options` parameter appears as that class's fields."""
    hints = typing.get_type_hints(options, include_extras=True)
    spread = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_annotated(hints[field.name], field),
        )
        for field in fields(options)  # type: ignore[arg-type] # a dataclass, as O cannot say
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own_hints = typing.get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=own_hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "options"
        ]

        @wraps(command)
        def spread_command(**values: Any) -> None:
            given = {parameter.name: values.pop(parameter.name) for parameter in spread}
            command(options=options(**given), **values)

        shown = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + spread
        _describe(spread_command, shown)
        return spread_command

    return decorate


def _annotated(hint: Any, field: Field[Any]) -> Any:
    """With the option that the field itself has, or as it is, which may have one."""
    return Annotated[hint, field.metadata[OPTION]] if OPTION in field.metadata else hint


def _describe(command: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    annotations: Mapping[str, Any] = {p.name: p.annotation for p in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # read by typer
    command.__annotations__ = {**annotations, "return": None}
    del command.__wrapped__  # type: ignore[attr-defined] # its own signature is not the command's
