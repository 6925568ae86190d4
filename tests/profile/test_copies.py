import time

import pytest

pytest.importorskip("torch")

import torch

from bigplan.profile import copies
from bigplan.profile.copies import WAYS, Copier, Passage, copiers_of, copying
from tests.profile.clock import FakeClock
from tests.profile.small import bench


def test_what_is_copied_is_counted_and_arrives() -> None:
    with copiers_of(bench(), 3 * 4096 + 5) as copiers:
        for number, copier in enumerate(copiers, start=1):
            copier.source.fill_(number)
        there, back = copiers
        assert [copier.way for copier in copiers] == list(WAYS)
        assert there.target.numel() == 3 * 4096  # whole pages
        with copying(copiers, time.perf_counter) as reached:
            time.sleep(0.05)
        assert there.nbytes % (3 * 4096) == 0
        assert there.nbytes > 0
        assert reached.rates["host_to_device"] == there.nbytes / there.seconds
        assert reached.total == sum(reached.rates.values())
        assert bool((there.target == 1).all())
        assert bool((back.target == 2).all())


class Asked:
    """An event that is set once it was asked so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def is_set(self) -> bool:
        self.times -= 1
        return self.times < 0


def test_a_copier_goes_over_all_of_its_memory_and_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "CHUNK", 4)
    source, target = torch.arange(1, 11), torch.zeros(10, dtype=torch.int64)
    copier = Copier(WAYS[0], torch.device("cpu"), source, target, None)
    copier.run(Asked(1), FakeClock())  # type: ignore[arg-type] # all that is asked of an event
    assert copier.nbytes == 8
    assert target.tolist() == [*range(1, 9), 0, 0]
    copier.run(Asked(3), FakeClock())  # type: ignore[arg-type]
    assert copier.nbytes == 8 + 14
    assert torch.equal(target, source)


def test_a_chunk_that_passes_leaves_while_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here, where a copy is over when it returns, one after the other."""
    monkeypatch.setattr(copies, "CHUNK", 4)
    clock, taken, order = FakeClock(), {WAYS[0]: 3.0, WAYS[1]: 2.0}, []

    def copy(copier: Copier, nbytes: int, start: int = 0) -> None:
        order.append((copier.way, start, nbytes))
        clock.now += taken[copier.way]

    monkeypatch.setattr(Copier, "copy", copy)
    device, empty = torch.device("cpu"), torch.zeros(6)
    into, off = (Copier(way, device, empty, empty, None) for way in WAYS)
    Passage(into, off).run(Asked(2), clock)  # type: ignore[arg-type] # all that is asked of it
    assert order == [
        *((way, 0, 4) for way in WAYS),
        *((way, 4, 2) for way in WAYS),
        *((way, 0, 4) for way in WAYS),
    ]
    assert (into.nbytes, into.seconds) == (10, 15.0)
    assert (off.nbytes, off.seconds) == (10, 6.0)


@pytest.mark.parametrize("passing", [False, True])
def test_a_window_that_is_over_at_once_has_a_chunk_of_each_copier(passing: bool) -> None:
    """As on a machine so busy that its threads begin after the window."""
    with copiers_of(bench(), 4096) as copiers:
        with copying(copiers, time.perf_counter, passing=passing) as reached:
            pass
        assert set(reached.rates) == set(WAYS)
        assert all(copier.nbytes > 0 for copier in copiers)


def test_an_error_in_a_copy_is_raised() -> None:
    short = Copier(WAYS[0], torch.device("cpu"), torch.zeros(3), torch.zeros(4), None)
    with pytest.raises(RuntimeError, match="size"), copying([short], time.perf_counter):
        time.sleep(0.01)
