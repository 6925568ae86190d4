"""How operators are built: locks of builds that were killed, and files compiled as one."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")

from bigplan.runtime.deepspeed import ops


def test_a_build_meets_no_lock_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor of an operator that is built inside its own build, as async_io builds pin_memory."""
    met: list[Path] = []

    class Builder:
        sources = cxx_args = list

        def load(self, verbose: bool) -> None:
            met.extend(tmp_path.glob("*/lock"))

    accelerator = SimpleNamespace(create_op_builder=lambda name: Builder())
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: accelerator)
    monkeypatch.setattr(ops, "ops_folder", lambda device: tmp_path)
    for name in ("async_io", "pin_memory"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    (tmp_path / "pin_memory" / "page_alloc.o").touch()
    ops.load(["async_io"], "cpu")
    assert not met
    assert (tmp_path / "pin_memory" / "page_alloc.o").exists()


def test_files_that_read_torchs_headers_are_one(tmp_path: Path) -> None:
    """The others stay as they are; ninja compiles again what is written again."""
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    sources, merged = AsyncIOBuilder().sources(), tmp_path / "async_io.cpp"
    first, *others = ops._together(sources, merged)
    assert first == str(merged)
    lines = merged.read_text().splitlines()
    included = [Path(line.split('"')[1]) for line in lines if line.startswith("#include")]
    assert sorted([*(file.name for file in included), *(Path(name).name for name in others)]) == (
        sorted(Path(name).name for name in sources)
    )
    assert {Path(name).parent.name for name in others} == {"common"}
    os.utime(merged, (1, 1))
    ops._together(sources, merged)
    assert merged.stat().st_mtime == 1
