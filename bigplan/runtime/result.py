"""What a worker hands back: after each step, and at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigplan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step as measured on one rank; `loss` is the global batch's mean."""

    step: int
    loss: float
    seconds: float
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a run: measured peak bytes by tier, remarks, a digest of the final weights."""

    memory: Mapping[str, int]
    notes: tuple[str, ...]
    digest: str
