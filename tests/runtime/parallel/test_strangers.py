"""Whoever is not of a run can neither read what its ranks tell each other nor disturb them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.multiprocessing.spawn import ProcessContext

from tests.listening import listening
from tests.runtime.harness import execute
from tests.runtime.parallel.held_ranks import NAME, run_rank
from tests.runtime.parallel.two_ranks import WORLD, cases
from tests.runtime.processes import start

SECONDS = 60.0  # for a connection on a busy machine
LOOPBACK = ("127.0.0.1", "::1")


def _elsewhere() -> list[str]:
    """Addresses of this machine but 127.0.0.1: another of its loopback, and its outward one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # a route is looked up, nothing is sent
        except OSError:
            return ["127.0.0.2"]
        return ["127.0.0.2", asked.getsockname()[0]]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[ProcessContext]:
    """Two ranks that have met and wait."""
    context = start(run_rank, tmp_path, WORLD, join=False)
    try:
        while not all((tmp_path / f"met.{rank}").exists() for rank in range(WORLD)):
            context.join(timeout=0.05)  # raises what fails in one
        yield context
    finally:
        for process in context.processes:
            process.kill()
            process.join()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed by Linux")
def test_ranks_listen_on_loopback_alone_and_strangers_there_change_nothing(
    ranks: ProcessContext, tmp_path: Path
) -> None:
    found = {at for process in ranks.processes for at in listening(process.pid)}
    assert found, "gloo's ranks listen for each other"
    assert {address for address, _ in found} <= set(LOOPBACK)
    for _, port in found:
        for address in _elsewhere():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), SECONDS)
    for at in found:
        with socket.create_connection(at, SECONDS) as stranger:
            stranger.sendall(bytes(range(256)))
    (tmp_path / "go").touch()
    while not ranks.join():
        pass
    losses = [(tmp_path / f"loss.{rank}").read_text() for rank in range(WORLD)]
    plan = cases()[NAME]
    alone = plan.model_copy(update={"strategy": plan.strategy.model_copy(update={"dp": 1})})
    assert losses[0] == losses[1]
    assert float(losses[0]) == pytest.approx(execute(alone, steps=1).losses[0], rel=1e-6)
