"""A GPU that works through its queue while the host's clock goes on: events and idle time."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.profile.clock import FakeClock


@dataclass
class FakeGpu:
    """What is queued runs in order. `idle` adds up the seconds in which the queue was empty."""

    clock: FakeClock = field(default_factory=FakeClock)
    free: float = 0.0  # when all that is queued is done
    idle: float = 0.0

    def queue(self, seconds: float) -> None:
        """Queue work; queueing takes the host a tenth of a millisecond."""
        self.idle += max(0.0, self.clock.now - self.free)
        self.free = max(self.free, self.clock.now) + seconds
        self.clock.work(1e-4)

    def event(self) -> FakeEvent:
        """In place of bench.event."""
        return FakeEvent(self)


@dataclass
class FakeEvent:
    """A CUDA event."""

    gpu: FakeGpu
    at: float = 0.0

    def record(self) -> None:
        """When what is queued by now is done."""
        self.at = max(self.gpu.free, self.gpu.clock.now)

    def synchronize(self) -> None:
        """The host sleeps until then, and wakes up a little later."""
        self.gpu.clock.now = max(self.gpu.clock.now, self.at) + 5e-5

    def elapsed_time(self, later: FakeEvent) -> float:
        """Milliseconds."""
        return 1e3 * (later.at - self.at)
