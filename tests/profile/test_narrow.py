from __future__ import annotations

from contextlib import nullcontext
from itertools import count

import pytest

pytest.importorskip("torch")

from bigplan.profile import narrow
from bigplan.profile.bench import Bench
from bigplan.profile.narrow import LAYERS, measure_narrow
from bigplan.program import Op
from bigplan.spec.catalog import find_cluster
from bigplan.timeline import Event, Timeline
from tests.profile.small import bench


class OnGpu(Bench):
    """A bench that takes its CPU for a GPU."""

    @classmethod
    def of(cls, bench: Bench) -> OnGpu:
        return cls(bench.devices, bench.cores, bench.threads)

    @property
    def cuda(self) -> bool:
        return True


def _timeline(forward: float, backward: float, between: float) -> Timeline:
    """A step whose layers but the first and the last take so many seconds."""
    events, at = [], 0.0
    for op, seconds in ((Op.FORWARD, forward), (Op.BACKWARD, backward)):
        for layer in range(LAYERS + 2):
            took = seconds if 0 < layer <= LAYERS else 7.0
            events.append(Event(0, "gpu compute", op.value, layer, 0, at, at + took))
            at += took + between
    return Timeline(tuple(events), at)


def test_overheads_are_those_of_the_layers_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPT-2 style block 10 and 19 operators, of a llama-style one 11 and 16, 8 of them fused.

    Their backwards launch 17 and 10 kernels more than one each.
    """
    steps = iter(([_timeline(0.5, 2.0, 0.01)] * 3, [_timeline(1.5, 2.5, 0.03)] * 3))
    monkeypatch.setattr(narrow, "_played", lambda *_: next(steps))
    monkeypatch.setattr(narrow, "_player", lambda *_: nullcontext(None))
    group = find_cluster("h200-1x").group
    free = group.gpu.model_copy(update={"launch_overhead": 0.01})
    found = measure_narrow(group.model_copy(update={"gpu": free}), OnGpu.of(bench()), 1.0).gpu
    operator = (0.5 + 2.0 - 0.17) / (10 + 19)
    assert found.operator_overhead == pytest.approx(operator, rel=0.01)
    more = 1.5 + 2.5 - 0.10 - (11 + 16) * operator
    assert found.kernel_overhead == pytest.approx(more / 8, rel=0.01)
    assert found.action_overhead == pytest.approx(0.02)
    assert "narrow layers" in found.sources["operator_overhead"]


def test_the_runtime_trains_them_for_as_long_as_allotted() -> None:
    ticks = count()
    group = find_cluster("h200-1x").group
    found = measure_narrow(group, bench(clock=lambda: float(next(ticks))), 4.0)
    assert 0 < found.gpu.action_overhead < found.gpu.operator_overhead < 0.1
