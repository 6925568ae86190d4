from pathlib import Path

import pytest

from bigplan.doctor import compiler


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compiler", lambda: None)
    monkeypatch.setattr(compiler, "find_spec", lambda name: None if name == "ninja" else object())
    monkeypatch.setattr("bigplan.doctor.compiler.shutil.which", lambda name: None)
    found = {one.name: one for one in compiler.examine()}
    assert found["C++"].state == "note"
    assert "CXX" in found["C++"].remedy
    assert "without a C++ compiler and ninja" in found["DeepSpeed"].found


def test_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compiler", lambda: ["ccache", "g++"])
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    cxx, _ = compiler.examine()
    assert (cxx.state, cxx.found) == ("good", "ccache g++, for the CPU's update")


def test_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "cache_folder", lambda: tmp_path / "a" / "b")
    assert compiler._cache().state == "good"
    assert list(tmp_path.iterdir()) == []  # looked at, not made
    monkeypatch.setattr("bigplan.doctor.compiler.os.access", lambda *_: False)
    assert compiler._cache().state == "note"
