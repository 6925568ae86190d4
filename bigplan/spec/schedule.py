"""The learning rate of every step: warm-up, then constant, linear or cosine decay."""

from __future__ import annotations

from math import cos, pi
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from bigplan.errors import InputError
from bigplan.spec.files.document import Spec

if TYPE_CHECKING:
    from bigplan.spec.optimizer import Optimizer

MOST_STEPS = 10**9  # optimizer steps; the longest trainings have some 10**7


class Schedule(Spec):
    """How the learning rate changes over the steps of a run."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(default=0, ge=0, le=MOST_STEPS)
    """steps in which the rate rises evenly, to the optimizer's rate at the last of them"""
    decay_steps: int | None = Field(default=None, gt=0, le=MOST_STEPS)
    """steps until the decay ends, warm-up included; default: training.steps"""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """part of the optimizer's rate that is left when the decay has ended"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name == "constant" and (self.decay_steps is not None or self.final_fraction):
            raise InputError(
                "decay_steps and final_fraction say how a rate decays, but the schedule is "
                "constant; use name: linear or cosine, or remove them"
            )
        if self.decay_steps is not None and self.warmup_steps >= self.decay_steps:
            raise InputError(self.too_long(self.decay_steps, "decay_steps"))
        return self

    def too_long(self, limit: int, key: str) -> str:
        """The message for a warm-up that leaves no step for the decay."""
        return (
            f"warmup_steps {self.warmup_steps} leaves no step of {key} {limit} to decay in; "
            f"use fewer than {limit}, or schedule constant"
        )


def learning_rate(schedule: Schedule, optimizer: Optimizer, step: int, steps: int) -> float:
    """The rate of update number `step`, counted from 1, in a run of `steps`.

    The last step of the warm-up and the first of the decay both have the whole rate. The decay
    reaches its end one step after `decay_steps`, so the last update still changes something. This
    equals torch's LinearLR(1 / warmup_steps, total_iters=warmup_steps - 1), followed by LinearLR or
    CosineAnnealingLR over decay_steps - warmup_steps.
    """
    assert step >= 1, step
    warm_up = schedule.warmup_steps
    if step <= warm_up:
        return optimizer.learning_rate * step / warm_up
    if schedule.name == "constant":
        return optimizer.learning_rate
    span = (schedule.decay_steps or steps) - warm_up
    progress = min(1.0, (step - 1 - warm_up) / span)
    left = 1.0 - progress if schedule.name == "linear" else 0.5 * (1.0 + cos(pi * progress))
    final = schedule.final_fraction
    return optimizer.learning_rate * (final + (1.0 - final) * left)
