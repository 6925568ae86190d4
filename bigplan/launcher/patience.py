"""How often a run that lost a rank starts again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Patience:
    """A limit on starts in a row without a new step; no limit while the run gains steps."""

    most: int
    _reached: int = -1  # steps at most when it last gave up a crew
    _tries: int = 0

    def again(self, reached: int) -> bool:
        """Whether to start once more; `reached` is the most steps that were ever done."""
        if reached > self._reached:
            self._reached, self._tries = reached, 0
        self._tries += 1
        return self._tries <= self.most
