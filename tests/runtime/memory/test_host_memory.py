from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bigplan.runtime.memory import host_memory
from bigplan.runtime.memory.host_memory import HostMemory, resident_bytes


def test_what_is_lost_is_counted_at_its_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    available = iter((100, 60, 80))
    monkeypatch.setattr(host_memory, "available_host_memory", lambda: next(available))
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: 7)
    memory = HostMemory()
    assert [memory.lost(), memory.lost()] == [47, 47]


def test_a_process_with_torch_takes_some() -> None:
    assert resident_bytes() > 50 << 20
