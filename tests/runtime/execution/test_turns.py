"""Copies to the host in pieces, beside chunks of state."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from bigplan.mechanics import PIECES_AHEAD
from bigplan.runtime.execution import turns
from bigplan.runtime.execution.turns import Turns

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(0,), (1,), (999, 1), (1000,), (1001, 5000), (5003, 3, 1, 7)])
def test_copies_arrive_whole(
    device: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PIECE_BYTES", 1000)
    turn = Turns()
    for nbytes in sizes:
        source = torch.randint(1, 255, (nbytes,), dtype=torch.uint8, device=device)
        around = torch.zeros(nbytes + 2, dtype=torch.uint8, pin_memory=device == "cuda")
        turn.copy(around[1:-1], source)
        if device == "cuda":
            turn.chunk_queued()
            torch.cuda.synchronize()
        assert around[1:-1].tolist() == source.tolist()
        assert around[0] == around[-1] == 0


class _End:
    """The end of a copy that has arrived once somebody has waited for it."""

    def __init__(self, waited: list[_End]) -> None:
        self.waited, self.arrived = waited, False

    def synchronize(self) -> None:
        self.waited.append(self)
        self.arrived = True

    def query(self) -> bool:
        return self.arrived


class _OnDevice:
    """Enough of a tensor on the device for its copies to be counted."""

    is_cuda = True

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def numel(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> _OnDevice:
        start, stop, _ = part.indices(self._nbytes)
        return _OnDevice(stop - start)


def test_pieces_are_queued_by_twos_and_one_by_one_while_a_chunk_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what is under way, and what was waited for, whenever a copy is queued."""
    ends: list[_End] = []
    waited: list[_End] = []
    under_way: list[int] = []

    def end() -> _End:
        ends.append(_End(waited))
        return ends[-1]

    def queue_copy(_: object, source: _OnDevice) -> None:
        under_way.append(sum(not each.arrived for each in pieces()))

    def pieces() -> list[_End]:
        return [each for each in ends if each is not chunk]

    chunk: _End | None = None
    monkeypatch.setattr(turns, "PIECE_BYTES", 100)
    monkeypatch.setattr(turns, "_end", end)
    monkeypatch.setattr(turns, "queue_copy", queue_copy)
    turn = Turns()
    turn.copy(_OnDevice(400), _OnDevice(400))  # type: ignore[arg-type]
    assert under_way == [0, 1, 1, 1]
    assert waited == ends[: 4 - PIECES_AHEAD]
    turn.chunk_queued()
    chunk = ends[-1]
    turn.copy(_OnDevice(200), _OnDevice(200))  # type: ignore[arg-type]
    assert under_way[4:] == [0, 0]
    chunk.arrived = True
    under_way.clear()
    for nbytes in (30, 30, 40, 100):  # the first three are a piece together
        turn.copy(_OnDevice(nbytes), _OnDevice(nbytes))  # type: ignore[arg-type]
    assert under_way == [1, 1, 1, 1]
