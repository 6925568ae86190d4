"""Passes without a backward: the validation's loss, and log-probabilities of pairs of responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bigplan.plan import Plan
from bigplan.runtime.context import Context
from bigplan.runtime.data import BatchSource, Prefetcher
from bigplan.runtime.execution.compute import Compute
from bigplan.runtime.execution.executor import Executor
from bigplan.runtime.execution.moves import mean_loss, mean_rewards
from bigplan.runtime.layers.preference import PairLoss, Scored
from bigplan.runtime.result import Evaluated, PairData

Part = Literal["training", "validation"]


@dataclass
class Forwards:
    """Forward passes of a rank, by its plan's own program; training goes on after them."""

    plan: Plan
    shard: int
    context: Context
    compute: Compute
    executor: Executor
    references: Mapping[Part, NDArray[np.float64]] = field(default_factory=dict)

    def evaluate(self) -> Evaluated:
        """The mean loss over the validation's batches."""
        pairs = self.compute.pairs
        try:
            if pairs is not None:
                pairs.reference = self.references.get("validation")
            self._play(self._source("validation"), 0)
            return Evaluated(*self.taken())
        finally:
            self.taken_back()
            if pairs is not None:
                pairs.reference = self.references.get("training")

    def taken(self) -> tuple[float, Mapping[str, float] | None]:
        """The mean loss of what was played, over all ranks, and rewards where pairs have some."""
        losses, groups, rewards = self.compute.losses, self.context.groups, None
        loss = mean_loss(losses.parts, groups)
        if self.compute.pairs is not None:
            rewards = mean_rewards(losses.rewards, groups)
        self.taken_back()
        return loss, rewards

    def taken_back(self) -> None:
        """Nothing was played."""
        self.compute.losses.parts.clear()
        self.compute.losses.rewards.clear()

    def refer(self, references: Mapping[Part, NDArray[np.float64]]) -> None:
        """Train with these log-probabilities [pairs, 2] of the model that training started from."""
        self.references = references
        self._pairs().reference = references["training"]

    def pair_data(self) -> dict[Part, PairData]:
        """What log-probabilities are wanted of: all training data, and what validation uses."""
        parts: list[Part] = ["training"]
        if self.plan.training.validation is not None:
            parts.append("validation")
        return {part: self._pair_data(part) for part in parts}

    def _pair_data(self, part: Part) -> PairData:
        source = self._source(part)
        assert source.packed is not None and source.steps is not None, "it has pairs, and an end"
        used = min(source.windows, source.steps * source.samples)
        wanted = int(source.packed.first[used])
        return PairData(source.data.fingerprint(), source.packed.pairs, wanted, source.steps)

    def score(self, part: Part, step: int) -> Scored:
        """Log-probabilities under the weights as they are, of pairs of a global batch.

        Of all ranks each pair is scored by one.
        """
        pairs, scored = self._pairs(), Scored()
        pairs.scoring = scored
        try:
            self._play(self._source(part, step + 1), step)
        finally:
            pairs.scoring = None
        return scored if self.context.groups.at.tensor == 0 else Scored()

    def _pairs(self) -> PairLoss:
        assert self.compute.pairs is not None, "no pairs are learned from"
        return self.compute.pairs

    def _source(self, part: Part, most: int | None = None) -> BatchSource:
        """Its batches in order, once; at most so many."""
        plan, validation = self.plan, self.plan.training.validation
        data = ""
        if part == "validation":
            assert validation is not None, "the plan has no validation"
            data = validation.data
            most = validation.batches if most is None else min(most, validation.batches)
        elif most is None:
            source = BatchSource.of(plan, self.shard)
            most = -(-source.windows // source.samples)
        return BatchSource.of(plan, self.shard, data, most)

    def _play(self, source: BatchSource, first: int) -> None:
        """The forward pass of the source's batches from step `first` on."""
        batches = Prefetcher(source, first)
        try:
            with self.compute.evaluating(batches):
                for step in range(first, source.steps or 0):
                    self.compute.begin(step)
                    self.executor.play(self.context.program.evaluate)
        finally:
            batches.close()
