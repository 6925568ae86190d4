"""Picks that are kept: found again by the same kernel of about the same size, and by no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from bigplan.cost.kernel import Shape, Tile
from bigplan.kernels.fusion import single
from bigplan.kernels.fusion.price import Fused
from bigplan.kernels.fusion.single import Single
from bigplan.kernels.launch import LaunchedKernel
from bigplan.kernels.optimised import Optimiser
from bigplan.kernels.tuned import PickFile, Tuner, key_of
from tests.kernels.generated import DEVICE, random

PRICER = Optimiser("h200-sxm", 0.0).pricer


def _fused(made: Single) -> Fused:
    fused = PRICER.fused(made.graph, made.graph.nodes, frozenset(made.wanted))
    assert isinstance(fused, Fused)
    return fused


def _norm(rows: int, columns: int = 64, dtype: str = "fp32") -> Fused:
    return _fused(single.norm("rmsnorm", (rows,), columns, dtype, 1e-5))


class _Clock:
    """The third that is asked for is the fastest."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, work: object) -> float:
        self.asked += 1
        return 1.0 if self.asked == 3 else 2.0


def test_a_kernel_is_timed_once(tmp_path: Path) -> None:
    store, clock = PickFile(tmp_path / "made" / "tuned.json"), _Clock()
    tuner = Tuner(4, "h200-sxm", 132, store, clock)
    x, weight = random(0, 9, 64), random(1, 64)
    first = _norm(9)
    kernel = LaunchedKernel(first.body, first.choices, tuner.tune)
    (out, *_) = kernel(x, weight)
    assert (clock.asked, kernel.tile) == (4, first.choices[2][0])
    assert out.device.type == DEVICE
    again = _norm(10)  # the same bucket
    twin = LaunchedKernel(again.body, again.choices, tuner.tune)
    twin(random(2, 10, 64), weight)
    assert (clock.asked, twin.tile) == (4, kernel.tile)
    other = _norm(100)
    LaunchedKernel(other.body, other.choices, tuner.tune)(random(3, 100, 64), weight)
    assert clock.asked == 8
    assert len(store.read()) == 2


def test_what_a_pick_is_kept_by() -> None:
    body = _norm(9).body
    same = replace(body, inputs=tuple(replace(v, name=f"arg{v.name}") for v in body.inputs),
                   micros=tuple(replace(m, source=f"arg{m.source}" if m.source else "")
                                for m in body.micros))  # fmt: skip
    key = key_of(body, "h200-sxm", "3.7.0")
    assert key == key_of(same, "h200-sxm", "3.7.0")
    others = (
        key_of(body, "a100-sxm4-80gb", "3.7.0"),
        key_of(body, "h200-sxm", "3.8.0"),
        key_of(_norm(9, dtype="bf16").body, "h200-sxm", "3.7.0"),
        key_of(_norm(9, columns=128).body, "h200-sxm", "3.7.0"),
        key_of(_fused(single.activation("relu", (9, 64), "fp32")).body, "h200-sxm", "3.7.0"),
    )
    assert len({key, *others}) == 6


def test_a_file_that_is_broken_or_of_another_version_is_none(tmp_path: Path) -> None:
    store = PickFile(tmp_path / "tuned.json")
    assert store.read() == {}
    for text in ("{", "[]", '{"version": 0, "tiles": {}}', '{"version": 1, "tiles": {"k": {}}}'):
        store.path.write_text(text)
        assert store.read() == {}
    tile = Tile(Shape.STRIP, 4, 64, 2, 132)
    store.keep("k", tile)
    assert store.read() == {"k": tile}
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.json"]


def test_a_pick_that_is_no_candidate_here_is_not_taken(tmp_path: Path) -> None:
    store, clock, fused = PickFile(tmp_path / "tuned.json"), _Clock(), _norm(9)
    import triton

    key = key_of(fused.body, "h200-sxm", triton.__version__)
    store.keep(key, Tile(Shape.ROW, 1, 32, 1))  # half a row
    kernel = LaunchedKernel(fused.body, fused.choices, Tuner(3, "h200-sxm", 132, store, clock).tune)
    kernel(random(0, 9, 64), random(1, 64))
    assert clock.asked == 3
