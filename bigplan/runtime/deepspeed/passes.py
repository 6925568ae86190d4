"""How an engine takes a step's micro-batches: one after the other, through the whole model.

A pipeline's way is in pipeline.py, which imports deepspeed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bigplan.program import Lane, Op
from bigplan.runtime.data import Batch
from bigplan.runtime.deepspeed.clock import PassClock

Take = Callable[[int], Batch]  # a micro-batch of the step, by its number; asked for in order


class DrivenEngine(Protocol):
    """Both kinds of engine, as the worker drives them."""

    @property
    def at_least(self) -> int:
        """Micro-batches that an update needs."""

    def train(self, take: Take, count: int, factor: float, clock: PassClock) -> Tensor:
        """One optimizer step of `count` micro-batches; this rank's part of the loss, fp32.

        A gradient is that of the sum of losses times `factor` over the targets that count.
        """

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """This rank's part of the mean loss over these micro-batches, fp32."""


@dataclass(frozen=True, slots=True)
class Whole:
    """The engine of a model that is whole on every rank."""

    engine: Any  # deepspeed.DeepSpeedEngine
    device: torch.device
    updates: Lane  # of the optimizer
    at_least: int = 1

    def train(self, take: Take, count: int, factor: float, clock: PassClock) -> Tensor:
        """See Passes."""
        engine, total = self.engine, torch.zeros((), device=self.device)
        for index in range(count):
            batch = take(index)
            with clock.phase(Op.FORWARD, index):
                loss = self._forward(batch)
            total += loss.detach() / batch.divisor
            engine.set_gradient_accumulation_boundary(is_boundary=index == count - 1)
            with clock.phase(Op.BACKWARD, index):
                engine.backward(loss * (factor / batch.divisor))
            if index < count - 1:
                engine.step()  # counts the micro-batch
        with clock.phase(Op.UPDATE, 0, self.updates):
            engine.step()
        return total

    def _forward(self, batch: Batch) -> Tensor:
        """The sum of the losses of this rank's micro-batch."""
        there = (each.to(self.device, non_blocking=True) for each in (batch.tokens, batch.targets))
        loss: Tensor = self.engine(*there)
        return loss

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """See Passes."""
        total = torch.zeros((), device=self.device)
        self.engine.eval()
        for batch in batches:
            total += self._forward(batch) / batch.divisor
        self.engine.train()
        return total
