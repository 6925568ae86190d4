"""Files and constants that the reference pages name exist."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
OURS = [
    path
    for folder in ("bigplan", "benchmarks", "docs", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".cpp", ".h", ".sh"}
]
THEIRS = {"pipelined_optimizer_swapper.py", "flash_api.cpp", "mask.h"}  # of other projects


@cache
def words() -> frozenset[str]:
    return frozenset(word for path in OURS for word in re.findall(r"\w+", path.read_text()))


@pytest.mark.parametrize("page", ["cost-model.md", "design.md", "kernels.md"])
def test_what_is_named_exists(page: str) -> None:
    named = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text())
    files = {name for name in named if re.fullmatch(r"[\w/.]+\.(py|cpp|h|sh)", name)} - THEIRS
    assert files
    assert [f for f in files if not any(f"/{path}".endswith(f"/{f}") for path in OURS)] == []
    constants = {name for name in named if re.fullmatch(r"([a-z_]+\.)*[A-Z][A-Z0-9_]+", name)}
    lasts = {name.rpartition(".")[2] for name in constants}
    assert lasts - words() == set()
