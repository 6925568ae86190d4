"""Locks of builds that were killed, which torch's builder would wait for without end."""

from __future__ import annotations

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
