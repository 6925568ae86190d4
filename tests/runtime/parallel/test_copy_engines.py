"""Gathers by copy engines: where they are taken, and what they bring together on two GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

from bigplan.graph.strategy import Strategy
from bigplan.runtime.memory.slab import Arena
from bigplan.runtime.parallel.copy_engines import copy_engines_between
from bigplan.runtime.parallel.groups import Groups
from tests.runtime.harness import take_gpu
from tests.runtime.processes import start

RANKS, NBYTES, ROUNDS = 2, 64 << 20, 50


def _joined(rank: int, folder: Path, backend: str) -> Groups:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return Groups.join(rank, Strategy(dp=RANKS, zero=3), backend, folder / "meeting")


def _on_cpus(rank: int, told: str) -> None:
    groups = _joined(rank, Path(told), "gloo")
    engines = copy_engines_between(groups, torch.device("cpu"), "equal")
    assert engines.pool is None
    assert engines.carry(groups, torch.empty(0)) is groups
    groups.close()


def test_cpus_have_none(tmp_path: Path) -> None:
    start(_on_cpus, tmp_path, RANKS)


def _on_gpus(rank: int, told: str, layouts: tuple[str, str]) -> None:
    """Ranks leave how many gathers were wrong, and what ran on the GPU."""
    take_gpu(rank)
    folder, device = Path(told), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    groups = _joined(rank, folder, "nccl")
    groups.warm(device)
    engines = copy_engines_between(groups, device, layouts[rank])
    arena = Arena(NBYTES, device, engines.pool)
    group = engines.carry(groups, arena.buffer).shard
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    generator = torch.Generator().manual_seed(0)  # the same on both
    with (
        torch.cuda.stream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
        profile(activities=[ProfilerActivity.CUDA]) as profiled,
    ):
        for turn in range(ROUNDS):
            size = int(torch.randint(1, NBYTES // 16, (), generator=generator))
            start = 16 * int(torch.randint(NBYTES // 32, (), generator=generator))
            expected = torch.randint(2**31, (RANKS, size), generator=generator, dtype=torch.int32)
            values = arena.buffer[start : start + 4 * RANKS * size].view(torch.int32)
            mine = expected[rank].to(device)
            if turn % 2:  # it may be in its place already
                mine = group.own(values).copy_(mine)
            group.all_gather(values, mine)
            wrong += (values != expected.flatten().to(device)).sum()
        torch.cuda.synchronize()
    names = {event.name for event in profiled.events() or () if event.device_time}
    (folder / f"{rank}").write_text(f"{int(wrong)} {any('AllGather' in name for name in names)}")
    arena.close()
    groups.close()


def _ran(folder: Path, layouts: tuple[str, str]) -> list[str]:
    if torch.cuda.device_count() < RANKS:
        pytest.skip("two ranks want two GPUs")
    spawn(_on_gpus, (str(folder), layouts), nprocs=RANKS)  # type: ignore[no-untyped-call]
    return [(folder / str(rank)).read_text() for rank in range(RANKS)]


@pytest.mark.gpu
def test_gathers_of_two_gpus_run_no_kernel(tmp_path: Path) -> None:
    assert _ran(tmp_path, ("equal", "equal")) == ["0 False", "0 False"]


@pytest.mark.gpu
def test_ranks_with_other_memory_gather_by_kernels(tmp_path: Path) -> None:
    assert _ran(tmp_path, ("this", "that")) == ["0 True", "0 True"]
