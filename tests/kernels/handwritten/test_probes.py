"""Microbenchmarks of multiprocessors read where they should, and nowhere else."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from bigplan.kernels.handwritten.probes import chase, read
from bigplan.profile.multiprocessor import WORDS, cycle
from tests.kernels.generated import DEVICE


def test_a_chain_goes_on_where_the_last_one_ended() -> None:
    table = cycle(50, torch.device("cpu"))
    at, place = 0, torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for steps in (7, 20):
        chase[(1,)](table.to(DEVICE), place, steps)
        for _ in range(steps):
            at = int(table[at])
        assert int(place) == at
    assert at % WORDS == 0


@pytest.mark.parametrize("programs", [1, 3, 40])
def test_blocks_are_read_within_the_buffer_in_turn(programs: int) -> None:
    """Places beyond the buffer are not a number: they would show in every sum."""
    block, blocks, turns = 64, 16, 9
    whole = torch.full((3 * block * blocks,), torch.nan, device=DEVICE)
    table = whole[block * blocks : 2 * block * blocks]
    table.copy_(torch.arange(block * blocks, device=DEVICE) // block)
    out = torch.empty(programs * block, device=DEVICE)
    read[(programs,)](table, out, block * blocks, turns, BLOCK=block)
    expected = [sum((p + t * programs) % blocks for t in range(turns)) for p in range(programs)]
    assert out.view(programs, block).tolist() == [[float(e)] * block for e in expected]
