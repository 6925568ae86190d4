"""`bigplan models`: the shipped models, or one model in full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigplan.cli.as_json import AsJson, print_json
from bigplan.cli.completion import known_models

if TYPE_CHECKING:
    from bigplan.spec.model import ModelSpec

_SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "max_sequence_length")
# Those that the list shows, and the columns' names: with all, figures would be cut at 80 columns.
_SHOWN = {k: k for k in ("layers", "hidden", "ffn", "heads")} | {"max_sequence_length": "length"}


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this one: shipped name, model YAML or Hugging Face config.json.",
            autocompletion=known_models,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shipped models, or show one as YAML with its source and parameters."""
    from bigplan.spec.catalog import find_model, list_models

    if name is not None:
        model = find_model(name)
        if as_json:
            print_json(_in_full(model))
        else:
            print(_as_yaml(model))
        return
    found = sorted(map(find_model, list_models()), key=_family_and_size)
    if as_json:
        print_json({"models": [_row(model) for model in found]})
    else:
        _print_table(found)


def _family_and_size(model: ModelSpec) -> tuple[str, int]:
    return model.name.rpartition("-")[0], model.parameter_count


def _row(model: ModelSpec) -> dict[str, Any]:
    sizes = {key: getattr(model, key) for key in _SIZES}
    experts = {key: getattr(model, key) for key in ("experts", "experts_per_token")}
    return {"name": model.name} | _counts(model) | sizes | experts


def _counts(model: ModelSpec) -> dict[str, int]:
    return {
        "parameters": model.parameter_count,
        "parameters_for_a_token": model.active_parameter_count,
    }


def _in_full(model: ModelSpec) -> dict[str, Any]:
    kinds = {kind: model.kind_parameter_count(kind) for kind in model.kinds()}
    return model.model_dump() | _counts(model) | {"parameters_of_kind": kinds}


def _as_yaml(model: ModelSpec) -> str:
    """A document to copy and change; a comment above it states what its keys imply."""
    from bigplan.spec.files.dump import to_yaml
    from bigplan.spec.layers import BLOCKS

    layers = model.layer_sequence()
    kinds = ", ".join(
        f"{kind}{f' {layers.count(kind)} x' if kind in BLOCKS else ''} "
        f"{model.kind_parameter_count(kind):,}"
        for kind in model.kinds()
    )
    passed = f" ({model.active_parameter_count:,} for a token)" if model.experts else ""
    return f"# {model.parameter_count:,} parameters{passed}: {kinds}\n{to_yaml(model)}".rstrip()


def _short(size: int) -> str:
    """Six characters at most, or names would be cut: Llama 4 Scout's 10,485,760 tokens are 10Mi."""
    return f"{size / 2**20:g}Mi" if size >= 1_000_000 else str(size)


def _print_table(found: list[ModelSpec]) -> None:
    from rich.console import Console

    from bigplan.report.text import table
    from bigplan.units import format_count, rounded

    numbers = ("size", *_SHOWN.values())
    shown = table("Shipped models", "name", *numbers, right=numbers, whole=("name", *numbers))
    for model in found:
        sizes = {name: _short(getattr(model, key)) for key, name in _SHOWN.items()}
        if model.experts:
            sizes["ffn"] = f"{model.experts}x{model.ffn}"
        size = format_count(rounded(model.parameter_count))
        shown.add_row(model.name, size, *sizes.values())
    Console().print(shown)
