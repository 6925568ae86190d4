import time

import pytest

pytest.importorskip("torch")

import torch

from bigplan.profile import bench as bench_module
from bigplan.profile.bench import Conditions
from bigplan.profile.load import Load, grouped_heads
from bigplan.profile.sensors import Reading, Watch
from tests.profile.gpu import FakeGpu
from tests.profile.small import bench


class Rounds(Load):
    """Load on a fake GPU: 10 ms a round."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(torch.device("cpu"), torch.float32, 256)
        self.gpu = gpu

    def queue(self) -> None:
        self.gpu.queue(0.01)


@pytest.mark.parametrize("seconds", [2e-6, 1e-4, 3e-3, 0.05])
def test_between_samples_the_gpu_stays_under_load_which_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(bench_module, "event", gpu.event)
    hot = bench(devices=(torch.device("cuda"),), clock=gpu.clock, load=Rounds(gpu))

    def work() -> None:
        gpu.queue(seconds)
        gpu.clock.now -= 9.9e-5  # a launch of 1 us

    gpu.queue(0.1)  # what heating left
    assert hot.median(work, 0.5) == pytest.approx(seconds)
    assert gpu.idle == 0
    assert gpu.clock.now == pytest.approx(0.5, abs=0.2)


def test_without_load_the_gpu_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(bench_module, "event", gpu.event)
    cold = bench(devices=(torch.device("cuda"),), clock=gpu.clock)
    assert cold.median(lambda: gpu.queue(1e-2), 0.2) == pytest.approx(1e-2)
    assert gpu.idle > 0


@pytest.mark.parametrize(
    ("load", "readings", "text"),
    [
        ("", [], ""),
        (", under sustained load", [], ", under sustained load"),
        (
            ", under sustained load",
            [Reading(1.3e9, 680, 4), Reading(1.34e9, 700, 4)],
            ", under sustained load at 1.32 GHz, 690 W, limited by power",
        ),
    ],
)
def test_conditions_end_a_sentence(load: str, readings: list[Reading], text: str) -> None:
    assert str(Conditions(load, Watch(readings))) == text


def test_conditions_of_a_cpu_and_of_a_gpu_that_does_not_settle() -> None:
    with bench().conditions() as conditions:
        pass
    assert str(conditions) == ""
    with bench(load=Load(torch.device("cpu"), torch.float32, 256)).conditions() as conditions:
        pass
    assert str(conditions) == ", under load, its rate still changing"


@pytest.mark.parametrize(
    ("capability", "dtype", "grouped"),
    [
        ((9, 0), torch.bfloat16, True),
        ((8, 0), torch.float16, True),
        ((9, 0), torch.float32, False),
        ((7, 5), torch.float16, False),
    ],
)
def test_attention_knows_grouped_heads_where_torch_has_a_fused_kernel_for_them(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    grouped: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert grouped_heads(torch.device("cuda"), dtype) is grouped
    assert not grouped_heads(torch.device("cpu"), dtype)


@pytest.mark.parametrize(("threads", "others_count"), [(1, False), (2, True)])
def test_a_device_of_one_core_is_timed_by_that_core(threads: int, others_count: bool) -> None:
    """Waiting, for others as for sleep, is no work of its own."""
    cpu = bench(threads=threads)
    slept = cpu.median(lambda: time.sleep(0.02), 0.1)
    assert (slept >= 0.02) == others_count
    assert cpu.median_on_host(lambda: time.sleep(0.02), 0.1) >= 0.02
