"""Jobs on all cores: all run, errors come back, torch's own threads stay as they were."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from bigplan.mechanics import CORES_BESIDE_COPIES, NICE
from bigplan.runtime.cpu.cores import Cores
from tests.runtime.processes import start


@pytest.fixture(params=[1, 3])
def cores(request: pytest.FixtureRequest) -> Iterator[Cores]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    made = Cores()
    yield made
    made.close()
    torch.set_num_threads(before)


def test_jobs_run_on_single_threaded_torch(cores: Cores) -> None:
    outside = torch.get_num_threads()
    seen: list[tuple[str, int]] = []
    cores.run(
        lambda: seen.append((threading.current_thread().name, torch.get_num_threads()))
        for _ in range(20)
    )
    assert len(seen) == 20
    assert {threads for _, threads in seen} == {1}
    assert all(name.startswith("core") for name, _ in seen)
    assert torch.get_num_threads() == outside


def _nicer(rank: int, folder: str) -> None:
    """Leave how nice the threads are of a process that is nice itself, as Ray's workers are."""
    own, torch_threads = os.nice(3), torch.get_num_threads()
    torch.set_num_threads(2)
    seen: list[int] = []
    with Cores() as cores:
        cores.run(lambda: seen.append(os.nice(0)) for _ in range(9))
    torch.set_num_threads(torch_threads)
    (Path(folder) / "nice").write_text(f"{own} {os.nice(0)} {min(seen)} {max(seen)}")


def test_threads_are_nicer_than_their_process(tmp_path: Path) -> None:
    start(_nicer, tmp_path, 1)
    own, later, *threads = map(int, (tmp_path / "nice").read_text().split())
    assert own == later
    assert threads == [min(19, own + NICE)] * 2


def test_a_thread_that_starts_later_has_all_of_torchs_threads(cores: Cores) -> None:
    cores.run([])
    seen: list[int] = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [torch.get_num_threads()]


def test_the_first_error_comes_back_when_all_have_ended(cores: Cores) -> None:
    ended: list[int] = []

    def job(number: int) -> None:
        ended.append(number)
        if number == 1:
            raise ValueError("one")

    with pytest.raises(ValueError, match="one"):
        cores.run(lambda n=n: job(n) for n in range(5))  # type: ignore[misc]
    assert sorted(ended) == list(range(5))


def test_a_part_of_the_cores_leaves_torchs_own_threads_as_they_were(cores: Cores) -> None:
    before = torch.get_num_threads()
    with Cores(CORES_BESIDE_COPIES) as some:
        assert some.count == {1: 1, 3: 3}[cores.count]
        assert torch.get_num_threads() == before
    torch.set_num_threads(8)
    with Cores(CORES_BESIDE_COPIES) as some:
        assert some.count == 6
    torch.set_num_threads(before)
