"""Products and exchanges that are queued beside each other, on a GPU that a test plays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch

from bigplan.profile import exchange
from bigplan.profile.budget import TimeBudget
from bigplan.profile.collectives import MOST_QUEUED, Exchanges, _beside_products, _kept
from bigplan.profile.fit import Exchange
from bigplan.profile.peers import Together
from tests.profile.clock import FakeClock

PRODUCT, GATHER = 2e-3, 0.5e-3  # seconds alone
PRODUCT_KEEPS, GATHER_KEEPS = 0.78, 0.25  # of their speed beside each other
LAYER = Exchange("all_gather", 2, 2**28)


@dataclass
class Mark:
    """An event: behind so much work of its stream, and when that has ended."""

    gpu: TwoStreams
    at: float = 0.0

    def record(self) -> None:
        self.gpu.queues[self.gpu.current].append(self)

    def elapsed_time(self, later: Mark) -> float:
        return 1e3 * (later.at - self.at)


@dataclass
class TwoStreams:
    """A GPU with a peer's two streams. Work runs once its queues are waited for."""

    queues: list[list[float | Mark]] = field(default_factory=list)
    current: int = -1  # the default stream, whose work is not played
    device: str = "cuda"

    def stream(self, _device: str) -> int:
        self.queues.append([])
        return len(self.queues) - 1

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        self.current, before = stream, self.current
        yield
        self.current = before

    def work(self, seconds: float) -> Callable[[], None]:
        return lambda: self.queues[self.current].append(seconds) if self.current >= 0 else None

    def wait(self) -> None:
        """Both streams' first work goes on at the speed that it keeps beside the other's."""
        now, keeps = 0.0, (PRODUCT_KEEPS, GATHER_KEEPS)
        left = [list(queue) for queue in self.queues]
        while any(left):
            for queue in left:
                while queue and isinstance(mark := queue[0], Mark):
                    mark.at = now
                    queue.pop(0)
            running = [n for n, queue in enumerate(left) if queue]
            speed = {n: keeps[n] if len(running) == 2 else 1.0 for n in running}
            step = min((float(left[n][0]) / speed[n] for n in running), default=0.0)  # type: ignore[arg-type]
            now += step
            for n in running:
                rest = float(left[n][0]) - step * speed[n]  # type: ignore[arg-type]
                if rest > 1e-12:
                    left[n][0] = rest
                else:
                    left[n].pop(0)
        for queue in self.queues:
            queue.clear()


class PlayedPeers:
    """Two processes that see the same; only products beside exchanges are played."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int]] = []
        self._patch = monkeypatch

    def __len__(self) -> int:
        return 2

    def call(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        if work is exchange.timed:
            return [args[1] * GATHER] * 2
        if work in (exchange.begin, exchange.end):
            return []
        if work is exchange.rate_of_company:
            return [1 / PRODUCT] * 2
        if work is exchange.timed_beside:  # with gaps between products nothing seems slower
            return [exchange.Beside(args[1] * GATHER, 1 / PRODUCT)] * 2
        gpu = TwoStreams()
        self._patch.setattr(torch.cuda, "Stream", gpu.stream)
        self._patch.setattr(torch.cuda, "stream", gpu.on)
        self._patch.setattr(exchange, "event", lambda: Mark(gpu))
        self._patch.setattr(exchange, "_product", lambda peer: peer.work(PRODUCT))
        self._patch.setattr(exchange, "_exchanging", lambda peer, _: peer.work(GATHER))
        found = [work(gpu, *args)] * 2
        self.asked.append((args[0], args[2]))
        return found


@pytest.mark.parametrize("seconds", [0.1, 3.0, 60.0])
def test_products_beside_exchanges_are_queued_as_in_training(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = PlayedPeers(monkeypatch)
    found = _beside_products(LAYER, cast(Together, peers), seconds)
    assert found.work == pytest.approx(PRODUCT_KEEPS, rel=0.01)
    assert found.exchange == pytest.approx(GATHER_KEEPS, rel=0.01)
    assert found.alone == GATHER
    assert max(products for products, _ in peers.asked) <= MOST_QUEUED
    for products, exchanges in peers.asked:
        assert exchanges == 0 or exchanges * GATHER / GATHER_KEEPS > products * PRODUCT


def test_an_exchange_that_outlasts_all_products_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = PlayedPeers(monkeypatch)
    beside, _ = peers.call(exchange.multiplied, 1, LAYER, 9)
    # The product ends after 2 / 0.78 ms, in which an exchange of 2 ms ends once.
    assert beside.work == pytest.approx(PRODUCT_KEEPS / PRODUCT)
    assert beside.exchange == pytest.approx(GATHER / GATHER_KEEPS)
    monkeypatch.setattr("tests.profile.test_exchange.GATHER", 5e-3)
    beside, _ = peers.call(exchange.multiplied, 1, LAYER, 1)
    assert beside.exchange > PRODUCT / PRODUCT_KEEPS


def test_a_link_says_what_queued_products_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = cast(Together, PlayedPeers(monkeypatch))
    asked = Exchanges(peers, (2,), [], True, FakeClock())
    figures, told = _kept(asked, TimeBudget(6.0, asked.clock))
    assert figures["compute_beside"] == pytest.approx(PRODUCT_KEEPS, rel=0.01)
    assert (figures["beside_compute"], figures["beside_copies"]) == (1.0, 1.0)
    assert "500 us alone and 2 ms beside products" in told["compute_beside"]
    assert figures.keys() == told.keys()
