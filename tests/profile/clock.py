"""Time that passes only when told to."""

from dataclasses import dataclass


@dataclass
class FakeClock:
    """A clock for budgets and medians."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> float:
        """Let time pass; the seconds, as a timed run tells them."""
        self.now += seconds
        return seconds
