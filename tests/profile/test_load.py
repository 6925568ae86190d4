import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from bigplan.profile import load
from bigplan.profile.load import FEW_TOKENS, MANY_TOKENS, Load, block_round, tokens_of_round
from bigplan.profile.machine import heat
from bigplan.spec.catalog import find_cluster
from tests.profile.gpu import FakeGpu
from tests.profile.small import bench

CPU = torch.device("cpu")


class Falling:
    """Rounds on a fake GPU that take longer and longer, until they take `longest` seconds."""

    def __init__(self, gpu: FakeGpu, longest: float, growth: float) -> None:
        self.gpu, self.longest, self.growth = gpu, longest, growth
        self.seconds = 0.9 * longest

    def __call__(self) -> None:
        self.gpu.queue(self.seconds)
        self.seconds += self.growth * (self.longest - self.seconds)


def heated(
    monkeypatch: pytest.MonkeyPatch, seconds: float, growth: float
) -> tuple[FakeGpu, Falling, Load]:
    gpu = FakeGpu()
    work, hot = Falling(gpu, 0.01, growth), Load(CPU, torch.float32, 256)
    monkeypatch.setattr(load, "event", gpu.event)
    monkeypatch.setattr(load, "block_round", lambda *_: work)
    hot.heat(seconds, gpu.clock)
    return gpu, work, hot


def test_heating_ends_when_the_rate_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, work, hot = heated(monkeypatch, 60.0, 0.01)
    assert hot.settled
    assert work.seconds == pytest.approx(0.01, rel=0.005)
    assert gpu.clock.now < 10


def test_a_rate_that_never_settles_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, _, hot = heated(monkeypatch, 5.0, 2e-3)
    assert not hot.settled
    assert 5.0 <= gpu.clock.now < 5.6


@pytest.mark.parametrize("seconds", [0.5, 8.0])
def test_the_gpu_never_waits_while_it_is_heated(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    gpu, _, _ = heated(monkeypatch, seconds, 0.01)
    # Once at the start, when the host has seen how long a round takes.
    assert gpu.idle < 1e-3
    assert gpu.free > gpu.clock.now  # and goes on when measuring starts


def test_the_probe_of_heating_changes_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, hot = FakeGpu(), Load(CPU, torch.float32, 256)
    monkeypatch.setattr(load, "event", gpu.event)
    monkeypatch.setattr(load, "block_round", lambda *_: Falling(gpu, 0.01, 0.5))
    group = find_cluster("h200-1x").group
    assert heat(group, bench(load=hot, clock=gpu.clock), 1.0) == group
    assert gpu.clock.now >= 1.0


@given(st.floats(1e10, 1e16))
def test_a_round_takes_ten_milliseconds_at_the_peak(peak: float) -> None:
    tokens = tokens_of_round(peak)
    assert tokens.bit_count() == 1
    assert FEW_TOKENS <= tokens <= MANY_TOKENS
    if FEW_TOKENS < tokens < MANY_TOKENS:
        assert 0.005 < 6 * 218.1e6 * tokens / peak <= 0.0101


def test_a_round_of_an_h200() -> None:
    assert tokens_of_round(989.4e12) == 4096


@pytest.mark.parametrize("tokens", [8, 64])
def test_a_round_is_a_blocks_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    sizes = {"HIDDEN": 32, "FFN": 48, "HEADS": 4, "KEY_VALUE_HEADS": 2, "HEAD": 8, "LONGEST": 16}
    for name, size in sizes.items():
        monkeypatch.setattr(load, name, size)
    gradients = block_round(tokens, torch.float32, CPU)()
    assert isinstance(gradients, tuple)
    length = min(tokens, 16)
    assert gradients[0].shape == (tokens // length, length, 32)
    # Query, key, value (whole heads on a CPU), output, gate, up, down.
    assert [tuple(g.shape) for g in gradients[1:]] == [(32, 32)] * 4 + [(48, 32)] * 2 + [(32, 48)]
    for gradient in gradients:
        assert bool(gradient.isfinite().all())
        assert float(gradient.abs().mean()) > 0
