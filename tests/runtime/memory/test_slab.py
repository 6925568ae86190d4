"""Bump allocators, views of bytes, and how much memory a machine has."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from bigplan.errors import PreflightError
from bigplan.mechanics import ALIGNMENT, PAGE
from bigplan.runtime.memory import slab

GIB = 2**30
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@given(st.lists(st.integers(0, 20_000), max_size=12))
def test_pieces_are_aligned_and_disjoint(sizes: list[int]) -> None:
    host = slab.Slab(sum(slab.align_up(n, PAGE) for n in sizes), pinned=False)
    arena = slab.Arena(sum(slab.align_up(n, ALIGNMENT) for n in sizes), "cpu")
    for memory, alignment in ((host, PAGE), (arena, ALIGNMENT)):
        pieces = [memory.take(n) for n in sizes]
        for number, piece in enumerate(pieces):
            piece.fill_(number + 1)
        for number, piece in enumerate(pieces):
            assert piece.numel() == 0 or piece.data_ptr() % alignment == 0
            assert bool((piece == number + 1).all())
        assert memory.used <= memory.size


@pytest.mark.parametrize("device", DEVICES)
def test_taking_more_than_declared_fails(device: str) -> None:
    arena = slab.Arena(1024, device)
    arena.take(1)
    assert arena.used == 1
    assert arena.take(768).device.type == device
    assert (arena.size, arena.used) == (1024, 1024)
    with pytest.raises(AssertionError, match="disagree"):
        arena.take(1)


def test_a_slab_is_zero_and_closes() -> None:
    host = slab.Slab(3 * PAGE + 5, pinned=False)
    piece = host.take(3 * PAGE + 5)
    assert not bool(piece.any())
    assert piece.data_ptr() % PAGE == 0
    host.close()
    host.close()
    piece.fill_(1)  # a view keeps the mapping alive
    with pytest.raises(AssertionError, match="closed"):
        _ = host.buffer


@pytest.mark.gpu
def test_a_pinned_slab_copies_asynchronously() -> None:
    host = slab.Slab(64 * PAGE, pinned=True)
    piece = host.take(32 * PAGE)
    assert piece.is_pinned()
    piece.fill_(7)
    copy = piece.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert bool((copy == 7).all())
    host.close()
    assert not piece.is_pinned()


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(PreflightError, match="--cap host"):
        slab.Slab(2**60, pinned=False)


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.lists(st.integers(0, 7), max_size=3),
)
def test_bytes_and_tensors_are_two_views_of_one_memory(
    dtype: torch.dtype, shape: list[int]
) -> None:
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = slab.aligned_empty(nbytes + 3)
    tensor = slab.typed(buffer, dtype, shape)
    tensor.copy_(torch.randint(0, 100, shape))
    assert list(tensor.shape) == shape
    assert torch.equal(tensor.view(-1).view(torch.uint8), buffer[:nbytes])
    if nbytes:
        with pytest.raises(AssertionError):
            slab.typed(buffer[: nbytes - 1], dtype, shape)


def test_declared_memory_replaces_what_the_machine_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {"MemTotal": 8 * GIB, "MemAvailable": 7 * GIB}
    monkeypatch.setattr(slab, "_meminfo", lambda path: shown)
    monkeypatch.setattr(slab, "_cgroup_headroom", lambda path: [])
    assert slab.available_host_memory() == 7 * GIB
    assert slab.available_host_memory(declared=128 * GIB) == 127 * GIB
    monkeypatch.setattr(slab, "_cgroup_headroom", lambda path: [3 * GIB, 20 * GIB])
    assert slab.available_host_memory(declared=128 * GIB) == 3 * GIB


def _group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def test_cgroup_v2_limits_of_every_level_count(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/worker\n")
    mount = tmp_path / "fs"
    _group(mount / "pod" / "worker", {"memory.max": "max", "memory.current": 5})
    statistics = "anon 100\ninactive_file 300"
    _group(
        mount / "pod",
        {"memory.max": 4000, "memory.current": 1000, "memory.stat": statistics},
    )
    assert list(slab._cgroup_headroom(membership, mount)) == [3300]


def test_cgroup_v1_limits_count(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("5:devices:/\n4:memory,hugetlb:/job\n0::/\n")
    files = {
        "memory.limit_in_bytes": 900,
        "memory.usage_in_bytes": 500,
        "memory.stat": "cache 4\ntotal_inactive_file 50",
    }
    _group(tmp_path / "fs" / "memory" / "job", files)
    assert list(slab._cgroup_headroom(membership, tmp_path / "fs")) == [450]


def test_this_machine_has_memory_and_disk(tmp_path: Path) -> None:
    assert slab.available_host_memory() > 0
    assert slab.available_disk(tmp_path) > 0
