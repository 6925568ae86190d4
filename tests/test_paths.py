import ast
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bigplan.paths import exists, is_dir, is_file

PACKAGE = Path(__file__).resolve().parent.parent / "bigplan"


def test_what_is_there_is_told(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.touch()
    link.symlink_to(tmp_path)
    os.mkfifo(pipe)
    assert [exists(path) for path in (tmp_path, file, link, pipe)] == [True] * 4
    assert [is_file(path) for path in (tmp_path, file, link, pipe)] == [False, True, False, False]
    assert [is_dir(path) for path in (tmp_path, file, link, pipe)] == [True, False, True, False]


def test_nothing_is_no_error(tmp_path: Path) -> None:
    file, ring = tmp_path / "file", tmp_path / "ring"
    file.touch()
    ring.symlink_to(ring)
    for path in (tmp_path / "none", file / "below", ring, Path("a\0b")):
        assert [exists(path), is_file(path), is_dir(path)] == [False] * 3


@pytest.mark.parametrize("ask", [exists, is_file, is_dir])
def test_where_nobody_may_look_is_an_error_on_every_python(ask: Callable[[Path], bool]) -> None:
    with pytest.raises(OSError, match="too long") as told:
        ask(Path("x" * 300))
    assert told.value.errno == errno.ENAMETOOLONG


def test_modules_that_ask_of_users_paths_ask_nothing_of_pathlib() -> None:
    """Whose answers depend on Python's version."""
    for module in PACKAGE.rglob("*.py"):
        text = module.read_text(encoding="utf-8")
        if "from bigplan.paths import" not in text:
            continue
        asked = {n.attr for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)}
        assert asked.isdisjoint(("exists", "is_file", "is_dir")), module
