"""Preference training as plain torch: every response alone, autograd, and the paper's formula.

No packing, no chunks, no second pass: a pair is two sequences, of which the model's log-probability
is a sum of log_softmax. `losses_of` is what TRL's DPOTrainer computes for loss_type "sigmoid", and
`losses_of_means` what its CPOTrainer does for "simpo", and its ORPOTrainer of responses alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.data.pairs import ABSENT
from bigplan.data.preferences import PairFields
from bigplan.data.prepare import Preparation, prepare
from bigplan.plan import Plan
from bigplan.runtime.data import BatchSource, data_path
from bigplan.runtime.layers import blocks
from bigplan.runtime.weights.first_values import first_values, whole_values
from bigplan.spec.preference import Preference
from bigplan.spec.training import Training, ValidationSpec
from tests.data.texts import documents, write_rows
from tests.runtime.handing import hidden_states
from tests.runtime.plans import tiny_training

LENGTH = 32
DPO: dict[str, object] = {"method": "dpo", "beta": 0.5, "label_smoothing": 0.1}
PAIRS = [
    {"prompt": f"{i}? " * (i % 3), "chosen": f"yes {i}", "rejected": "no" * (1 + i % 4)}
    for i in range(15)
]


def prepare_pairs(folder: Path) -> Path:
    """Pairs of very different lengths, several in most sequences."""
    source = write_rows(folder / "pairs.jsonl", PAIRS)
    prepare(Preparation((source,), PairFields("prompt", "chosen", "rejected")), folder / "data")
    return folder / "data"


def pair_training(data: object, batch: int = 4, **changes: object) -> Training:
    """By SGD, whose first step shows gradients; clipped by more than any norm, to tell it."""
    fields: dict[str, object] = {
        "data": str(data),
        "sequence_length": LENGTH,
        "isolate_documents": True,
        "preference": DPO,
        "validation": ValidationSpec(data=str(data), every=1, batches=2),
        "optimizer": {"name": "sgd", "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0},
    }
    return tiny_training(batch, **(fields | changes))


def losses_of(policy: Tensor, reference: Tensor, beta: float, smoothing: float) -> Tensor:
    """Of pairs by log-probabilities [n, 2], chosen and rejected."""
    logits = (policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1])
    right, wrong = F.logsigmoid(beta * logits), F.logsigmoid(-beta * logits)
    return -right * (1 - smoothing) - wrong * smoothing


def losses_of_means(means: Tensor, wanted: Preference) -> Tensor:
    """Of pairs by log-probabilities [n, 2] of a token on average, chosen and rejected."""
    kept, wrong, beta = 1 - wanted.label_smoothing, wanted.label_smoothing, wanted.beta
    if wanted.method == "simpo":
        assert wanted.gamma is not None
        logits = means[:, 0] - means[:, 1] - wanted.gamma / beta
        return -kept * F.logsigmoid(beta * logits) - wrong * F.logsigmoid(-beta * logits)
    odds = means.exp() / (1 - means.exp())
    ratio = odds[:, 0] / odds[:, 1]
    right = kept * (ratio / (1 + ratio)).log() + wrong * (1 / (1 + ratio)).log()
    return -means[:, 0] - beta * right


@dataclass
class PairLoop:
    """Trains a plan's whole model in fp32 on the CPU, whatever its ranks."""

    plan: Plan
    layers: list[dict[str, Tensor]] = field(init=False)
    reference: Tensor = field(init=False)  # of all pairs of the training's data
    gradients: list[dict[str, Tensor]] = field(init=False)  # of the last step
    accuracy: float = 0.0
    _step: int = 0

    def __post_init__(self) -> None:
        model, training = self.plan.model, self.plan.training
        first = first_values(model, training)
        self.layers = [
            {p.name: whole_values(first, kind, layer, p).clone() for p in model.kinds()[kind]}
            for layer, kind in enumerate(model.layer_sequence())
        ]
        for layer in self.layers:
            for value in layer.values():
                value.requires_grad_()
        each = documents(data_path(training.data))
        self._pairs = list(zip(each[::2], each[1::2], strict=True))
        with torch.no_grad():
            self.reference = self._likely(range(len(self._pairs)))

    @property
    def refers(self) -> bool:
        """Whether the method compares with the starting model."""
        wanted = self.plan.training.preference
        return wanted is not None and wanted.refers

    def step(self) -> float:
        """One step of SGD without momentum; its loss."""
        training = self.plan.training
        loss = self._loss(self._numbers(None, self._step))
        flat = [(layer, name) for layer in self.layers for name in layer]
        found = torch.autograd.grad(loss, [layer[name] for layer, name in flat])
        self.gradients = [{} for _ in self.layers]
        places = [i for i, layer in enumerate(self.layers) for _ in layer]
        for place, (layer, name), gradient in zip(places, flat, found, strict=True):
            value = layer[name]
            self.gradients[place][name] = gradient
            stepped = value - training.optimizer.learning_rate * gradient
            layer[name] = stepped.detach().requires_grad_()
        self._step += 1
        return float(loss.detach())

    def validated(self) -> float:
        """The mean loss over the validation's batches, whose data is the training's."""
        wanted = self.plan.training.validation
        assert wanted is not None
        source = self._source(wanted.batches)
        every = [n for step in range(source.steps or 0) for n in self._numbers(source, step)]
        with torch.no_grad():
            return float(self._loss(every))

    def _loss(self, numbers: list[int]) -> Tensor:
        wanted = self.plan.training.preference
        assert wanted is not None
        likely, reference = self._likely(numbers), self.reference[numbers]
        if not wanted.refers:
            means = likely / self._lengths(numbers)
            self.accuracy = float((means[:, 0] > means[:, 1]).double().mean())
            return losses_of_means(means, wanted).mean()
        rewards = likely.detach() - reference
        self.accuracy = float((rewards[:, 0] > rewards[:, 1]).double().mean())
        return losses_of(likely, reference, wanted.beta, wanted.label_smoothing).mean()

    def _source(self, batches: int | None) -> BatchSource:
        training = self.plan.training
        return BatchSource(
            data_path(training.data), training.sequence_length, training.global_batch, 0, 1,
            training.seed, batches=batches, isolated=True, paired=True,
        )  # fmt: skip

    def _numbers(self, source: BatchSource | None, step: int) -> list[int]:
        found = (source or self._source(None)).pairs(step).flatten().tolist()
        return [number for number in found if number != ABSENT]

    def _lengths(self, numbers: list[int]) -> Tensor:
        """Tokens of responses, [n, 2]; 1 of one without."""
        each = [[max(1, sum(d.counts[1:])) for d in self._pairs[number]] for number in numbers]
        return torch.tensor(each)

    def _likely(self, numbers: object) -> Tensor:
        """Log-probabilities [n, 2] of responses, each alone."""
        rows = []
        for number in numbers:  # type: ignore[attr-defined]
            each = []
            for document in self._pairs[number]:
                ids, counts = torch.tensor(document.ids), torch.tensor(document.counts[1:])
                words = self._scores(ids[:-1]).log_softmax(-1)
                each.append((words.gather(1, ids[1:, None])[:, 0] * counts).sum())
            rows.append(torch.stack(each))
        return torch.stack(rows)

    def _scores(self, tokens: Tensor) -> Tensor:
        """Logits [n, V] in fp32."""
        model, p = self.plan.model, self.layers
        x = hidden_states(model, p, tokens[None])
        last = p[-1] | (p[0] if model.tied_embeddings else {})
        scores = blocks.logits(last, x, model)[0]
        cap = model.logit_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)
