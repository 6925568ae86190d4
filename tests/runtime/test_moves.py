"""Copies between tiers, piece by piece."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from bigplan.runtime import moves
from bigplan.runtime.moves import copy_in_turns


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("nbytes", [0, 1, 999, 1000, 1001, 5000, 5003])
def test_a_copy_in_turns_has_arrived_whole(
    device: str, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "PIECE", 1000)
    source = torch.randint(1, 255, (nbytes,), dtype=torch.uint8, device=device)
    around = torch.zeros(nbytes + 2, dtype=torch.uint8, pin_memory=device == "cuda")
    copy_in_turns(around[1:-1], source)
    assert around[1:-1].tolist() == source.tolist()
    assert around[0] == around[-1] == 0
