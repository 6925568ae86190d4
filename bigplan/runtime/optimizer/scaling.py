"""Decisions about a step once all its gradients are known: scale, clip, apply or skip.

With a loss scale s and the norm n of the unscaled gradients, gradients are divided by
s * max(1, (n + 1e-6) / clip_norm): the factor of torch.nn.utils.clip_grad_norm_, as one division.

A step whose gradients are not finite is skipped in every precision, on all layers and ranks (the
gradients are reduced already, so the norm is the same everywhere). Weights and moments stay as they
are, and so does the count of updates, from which Adam's bias correction follows. In fp16 the scale
finds its range that way. In bf16 and fp32 a skip saves the weights from one bad batch. Many such
steps in a row mean that the run is lost, and the launch ends it (launcher/skipped.py). The learning
rate follows the steps, skipped ones included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from bigplan.spec.schedule import learning_rate
from bigplan.spec.training import SMALLEST_SCALE, Training

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the updates of one step do with its gradients."""

    learning_rate: float
    number: int  # of the update, counted from 1; skipped steps have none of their own
    divisor: float = 1.0
    skipped: bool = False
    loss_scale: float | None = None  # of the step's loss, in fp16
    gradient_norm: float | None = None  # unscaled and unclipped; None: not asked for, not finite


class Scaling:
    """The loss scale, and how many steps went well: all that later steps need to know."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._scaled = training.precision == "fp16"
        self._scale = training.loss_scale.initial if self._scaled else 1.0
        self._good = 0  # steps since the scale changed
        self._applied = 0

    @property
    def scale(self) -> float:
        """What the next step's loss is multiplied by."""
        return self._scale

    def unseen(self, step: int) -> Verdict:
        """For the updates of step `step` (from 1) when they do not wait for the gradients' norm."""
        self._applied += 1
        return Verdict(self._rate(step), self._applied)

    def judge(self, step: int, scaled_norm: float) -> Verdict:
        """From the norm of step's gradients, as they came from the scaled loss."""
        scale = self._scale
        norm = scaled_norm / scale
        rate, shown = self._rate(step), scale if self._scaled else None
        if not isfinite(norm):
            self._overflow()
            return Verdict(rate, self._applied, skipped=True, loss_scale=shown)
        self._applied += 1
        self._grow()
        limit = self._training.clip_norm
        clip = 1.0 if limit is None else max(1.0, (norm + EPSILON) / limit)
        return Verdict(rate, self._applied, scale * clip, loss_scale=shown, gradient_norm=norm)

    def _rate(self, step: int) -> float:
        training = self._training
        return learning_rate(training.schedule, training.optimizer, step, training.steps)

    def _grow(self) -> None:
        self._good += 1
        if self._scaled and self._good >= self._training.loss_scale.growth_interval:
            self._scale *= self._training.loss_scale.factor
            self._good = 0

    def _overflow(self) -> None:
        self._good = 0
        if self._scaled:
            self._scale = max(SMALLEST_SCALE, self._scale / self._training.loss_scale.factor)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; after a step it belongs to that step's weights, updated."""
        return {
            "scale": self._scale,
            "good": self._good,
            "applied": self._applied,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from `state`."""
        if self._scaled:
            self._scale = float(state["scale"])
        self._good, self._applied = (int(state[key]) for key in ("good", "applied"))
