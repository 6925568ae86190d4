"""The loss of pairs of responses (spec/preference.py), and what each token counts in its gradient.

The loss of a pair needs the log-probabilities of both responses, sums over all their tokens. So the
head takes the tokens' cross-entropies first, and once more with their gradients when it is known
what each counts: the loss by a token's cross-entropy is the same for all tokens of a response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bigplan.data.pairs import ABSENT
from bigplan.runtime.context import Context
from bigplan.runtime.data import IGNORED
from bigplan.runtime.layers.losses import Losses
from bigplan.runtime.layers.visit import Visit
from bigplan.spec.preference import Preference

NEAR = 2.0**-24  # to a probability of 1: tokens' losses in fp32 tell no nearer
REWARDS = ("accuracy", "chosen", "rejected")  # that a step has the mean of, over pairs


@dataclass
class Scored:
    """Log-probabilities of responses, fp64 [pairs, 2], chosen and rejected, and whose they are."""

    pairs: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    values: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 2)))

    def add(self, pairs: NDArray[np.int64], values: Tensor) -> None:
        """Those of a micro-batch, [b, most] and [b, most, 2]; ABSENT ones are none."""
        there = pairs != ABSENT
        self.pairs = np.concatenate((self.pairs, pairs[there]))
        self.values = np.concatenate((self.values, values.cpu().numpy()[there]))


class PairLoss:
    """The loss of a step's pairs, micro-batch by micro-batch.

    `reference` [pairs, 2] has the log-probabilities under the model that training started from,
    where the method compares with it.
    While `scoring` is set no loss is known, and it takes log-probabilities instead.
    """

    def __init__(self, context: Context, wanted: Preference, losses: Losses) -> None:
        self._context, self._wanted, self._losses = context, wanted, losses
        self.reference: NDArray[np.float64] | None = None
        self.scoring: Scored | None = None
        self._pairs = np.empty((0, 0, 0), np.int64)
        self._there = self._starting = torch.empty(0)

    def fill(self, pairs: NDArray[np.int64]) -> None:
        """Those of the next step, as BatchSource.pairs has them."""
        self._pairs = pairs
        if self.scoring is not None:
            return
        device, there = self._context.device, pairs != ABSENT
        self._there = torch.from_numpy(there).to(device)
        if self._wanted.refers:
            assert self.reference is not None, "the starting model's log-probabilities come first"
            self._starting = torch.from_numpy(self.reference[np.where(there, pairs, 0)]).to(device)

    def weights(self, visit: Visit, losses: Tensor, targets: Tensor) -> Tensor:
        """What each token counts in the sum that the gradient is of, fp32 [n], from losses [n].

        `targets` int64 [n] are IGNORED where nothing counts.

        The loss goes to the step's. With ranks that have parts of sequences, each has the tokens of
        its own part and the sums of all.
        """
        number = visit.action.micro_batch
        responses, most = self._responses(visit), self._pairs.shape[2]
        likely = -self._summed(responses, losses, 2 * most + 1)
        once = self._context.context_parallel.group.place == 0
        if self.scoring is not None:
            if once:
                self.scoring.add(self._pairs[number], likely)
            return torch.zeros_like(losses)
        there, lengths = self._there[number], torch.ones_like(likely)
        if self._wanted.refers:
            scores = likely - self._starting[number]
        else:
            lengths = self._summed(responses, targets != IGNORED, 2 * most + 1).clamp(min=1)
            scores = likely / lengths
        # Of no pair any number will do, but 0, which has no odds.
        scores = torch.where(there[..., None], scores, -1.0)
        loss, by_scores = losses_of(self._wanted, scores)
        rewards = self._wanted.beta * scores
        if once:
            right = (rewards[..., 0] > rewards[..., 1]).double()
            told = torch.stack((loss, right, *rewards.unbind(-1)))
            means = (told * there).sum((1, 2)) * self._losses.share
            self._losses.parts.append(means[0].float())
            self._losses.rewards.append(means[1:].float())
        each = torch.where(there[..., None], -by_scores / lengths, 0.0).float().flatten(1)
        return F.pad(each, (0, 1)).gather(1, responses).flatten()

    def _responses(self, visit: Visit) -> Tensor:
        """Which document of its sequence each of this rank's tokens is of, int64 [b, s]."""
        begins = visit.begins
        assert begins is not None, "documents of pairs are kept apart"
        places = torch.arange(begins.shape[1], device=begins.device)
        numbers = (begins == places).cumsum(1) - 1
        start = self._context.context_parallel.group.place * self._context.length
        return numbers[:, start : start + self._context.length]

    def _summed(self, responses: Tensor, values: Tensor, most: int) -> Tensor:
        """Sums over responses of tokens' values [n], fp64 [b, pairs, 2].

        In fp64 the order of the sum, which a GPU leaves open, changes no digit that is read.
        """
        rows, group = len(responses), self._context.context_parallel.group
        sums = torch.zeros(rows * most, dtype=torch.float64, device=values.device)
        first = torch.arange(0, rows * most, most, device=values.device)
        sums.index_add_(0, (responses + first[:, None]).flatten(), values.double())
        if group.size > 1:  # messages are all that these ranks exchange (parallel/group.py)
            sums = group.exchanged(sums.expand(group.size, -1)).sum(0)
        return sums.view(rows, most)[:, :-1].reshape(rows, -1, 2)


def losses_of(wanted: Preference, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of pairs [...] by scores [..., 2] of chosen and rejected, and derivatives by these.

    Scores are log-probabilities beside the starting model's, or means over tokens.
    spec/preference.py has the formulas.
    """
    if wanted.method != "orpo":
        rewards = wanted.beta * scores
        margins = rewards[..., 0] - rewards[..., 1] - (wanted.gamma or 0.0)
        loss, slope = _by_margins(margins, wanted.label_smoothing)
        by_chosen = wanted.beta * slope
        return loss, torch.stack((by_chosen, -by_chosen), dim=-1)
    rest = -torch.expm1(scores).clamp(max=-NEAR)
    odds = scores - rest.log()
    loss, slope = _by_margins(odds[..., 0] - odds[..., 1], wanted.label_smoothing)
    by_chosen, by_rejected = (wanted.beta * slope[..., None] / rest).unbind(-1)
    both = torch.stack((by_chosen - 1.0, -by_rejected), dim=-1)
    return wanted.beta * loss - scores[..., 0], both


def _by_margins(margins: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Losses of pairs, and their derivatives."""
    kept = 1.0 - smoothing
    loss = -kept * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
    slope = -kept * torch.sigmoid(-margins) + smoothing * torch.sigmoid(margins)
    return loss, slope


def named_rewards(means: Tensor) -> Mapping[str, float]:
    """Means over pairs by name, with the margin between chosen and rejected."""
    found = dict(zip(REWARDS, means.tolist(), strict=True))
    return found | {"margin": found["chosen"] - found["rejected"]}
