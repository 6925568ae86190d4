"""What is made of the times that attention takes, and which are asked for."""

import pytest

pytest.importorskip("torch")

from bigplan.cost.compute import Device, attention_seconds
from bigplan.graph.operators import Attention
from bigplan.profile import attention
from bigplan.profile.attention import BACKWARD, CPU_CASES, HEAD, measure_attention
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.detect.cluster import detect
from tests.profile.small import bench

GROUP = find_cluster("h200-1x").group


def _measured(
    monkeypatch: pytest.MonkeyPatch, group: NodeGroup, slower: float = 1.0, seconds: float = 1.0
) -> tuple[NodeGroup, list[int]]:
    """`group` measured where a device does what an H200 does, `slower`; and the lengths asked."""
    lengths: list[int] = []

    def timed(batch: int, length: int, heads: int, *_: object) -> tuple[float, float]:
        lengths.append(length)
        flops = 2.0 * batch * heads * length**2 * HEAD
        there = Attention("attention", flops, 0.0, False, HEAD, length)
        back = Attention("attention", BACKWARD * flops, 0.0, True, HEAD, length)
        device = Device(GROUP.gpu, "fp32", ("sdpa",))
        return slower * attention_seconds(there, device), slower * attention_seconds(back, device)

    monkeypatch.setattr(attention, "_seconds", timed)
    return measure_attention(group, bench(), seconds), lengths


def test_what_the_device_does_is_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CPU_CASES", attention.GPU_CASES)
    group, lengths = _measured(monkeypatch, GROUP, slower=2.0, seconds=100.0)
    assert lengths == [4096, 8192, 16384, 32768]
    for way in ("forward", "backward"):
        figures = (f"attention_{way}_efficiency", f"attention_{way}_half_length")
        (share, half), (known, known_half) = (
            [getattr(of.gpu, name) for name in figures] for of in (group, GROUP)
        )
        assert share["sdpa"] == pytest.approx(known["sdpa"] / 2, rel=0.01)
        assert half["sdpa"] == pytest.approx(known_half["sdpa"], rel=0.02)
        assert share["flash3"] == known["flash3"]  # not measured
        for name in figures:
            told = group.gpu.sources[name]
            assert "4096, 8192, 16384, 32768 tokens, met to 0% at worst, fp32" in told
        others = ", ".join(kernel for kernel in known if kernel != "sdpa")
        for name in figures:
            assert f"; {others}: {GROUP.gpu.sources[name]}" in group.gpu.sources[name]


def test_a_slow_device_is_not_asked_for_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CPU_CASES", attention.GPU_CASES)
    _, lengths = _measured(monkeypatch, GROUP, slower=1e6)
    assert lengths == [4096, 8192]  # two constants need two


def test_a_cpu() -> None:
    group = detect(cpu_devices=1, drive=False).group
    found = measure_attention(group, bench(), 0.1).gpu
    for way in ("forward", "backward"):
        assert getattr(found, f"attention_{way}_efficiency").keys() == {"sdpa"}
        half = getattr(found, f"attention_{way}_half_length")["sdpa"]
        assert 0 <= half <= max(length for _, length, _ in CPU_CASES)
