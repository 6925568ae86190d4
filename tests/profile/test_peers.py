"""Processes that do as told, and end whatever they wait for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from bigplan.errors import WorkerError
from bigplan.profile.peers import Company, Peer, Peers

CPU = torch.device("cpu")


def _sum_of_ranks(peer: Peer, more: float) -> tuple[int, float, int]:
    total = torch.tensor([float(peer.rank) + more])
    dist.all_reduce(total)
    return os.getpid(), float(total), torch.get_num_threads()


def _fail_on_the_last(peer: Peer) -> None:
    if peer.rank == peer.world - 1:
        raise ValueError("this one cannot")
    dist.all_reduce(torch.zeros(1))  # and so waits for ever


def _end_early(peer: Peer) -> None:
    os._exit(peer.rank)


def _rank(peer: Peer) -> int:
    return peer.rank


def _gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_peers_meet_and_answer_in_their_order() -> None:
    with Peers((CPU, CPU), threads=1) as peers:
        found = peers.call(_sum_of_ranks, 0.5)
        assert [total for _, total, _ in found] == [2.0, 2.0]
        assert [threads for _, _, threads in found] == [1, 1]
        pids = {pid for pid, _, _ in found}
        assert len(pids | {os.getpid()}) == 3
        assert peers.call_some((1,), _rank) == [1]
        folder = Path(peers._folder.name)
        assert folder.stat().st_mode & 0o077 == 0
    assert all(map(_gone, pids))
    assert not folder.exists()


def test_an_error_ends_those_that_wait_for_who_failed() -> None:
    with Peers((CPU, CPU), threads=1) as peers:
        pids = [pid for pid, _, _ in peers.call(_sum_of_ranks, 0.0)]
        with pytest.raises(WorkerError, match="process 1 of 2: this one cannot"):
            peers.call(_fail_on_the_last)
    assert all(map(_gone, pids))


def test_a_process_that_ends_is_told() -> None:
    with Peers((CPU,), threads=1) as peers, pytest.raises(WorkerError, match="ended early"):
        peers.call(_end_early)


def test_company_works_until_it_is_stopped() -> None:
    company = Company(lambda: time.sleep(0.001), threads=1)
    while company.runs < 3:
        time.sleep(0.001)
    company.stop()
    runs = company.runs
    time.sleep(0.01)
    assert company.runs == runs
