"""Machines are detected in a moment."""

import pytest


@pytest.fixture(autouse=True)
def _detect_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tests.profile.small import detect_soon

    detect_soon(monkeypatch)
