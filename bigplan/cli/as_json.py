"""The output of `--json`: one object that begins with the version of its format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

import typer

FORMAT = 1
"""rises when a key goes or changes its meaning; new keys alone do not raise it"""

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
]


def print_json(data: Mapping[str, object]) -> None:
    """Print an object on stdout, its format's version first."""
    assert "format" not in data, data["format"]
    print(json.dumps({"format": FORMAT, **data}, indent=2))
