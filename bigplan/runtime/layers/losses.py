"""The loss of a step, as its micro-batches tell it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Losses:
    """The loss of a step, in parts, and the factors of its gradients."""

    parts: list[Tensor] = field(default_factory=list)  # their sum is the mean over the targets
    rewards: list[Tensor] = field(default_factory=list)  # or over pairs, of preference.REWARDS
    counted: int = 0  # targets in that mean, or pairs
    share: float = 0.0  # weight of one target in the step's mean, over all ranks
    scale: float = 1.0  # factor of gradients, not of reported losses
