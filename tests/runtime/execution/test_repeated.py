"""Updates repeated from graphs have the factors of their own step's verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.program import Action, Lane, Op
from bigplan.runtime.execution import repeated
from bigplan.runtime.execution.repeated import Factors, RepeatedUpdates
from bigplan.runtime.optimizer.scaling import Verdict
from bigplan.spec.optimizer import ParameterRule

DECAYED, PLAIN = ParameterRule(0.5, 1.0), ParameterRule(0.0, 1.0)
ACTIONS = [Action(Op.UPDATE, Lane.COMPUTE, layer) for layer in (1, 2)]


class _Graph:
    """What is captured is done when the graph is replayed, as on a GPU."""

    current: _Graph | None = None

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def replay(self) -> None:
        for work in self.work:
            work()


@contextmanager
def _capturing(graph: _Graph) -> Iterator[None]:
    _Graph.current = graph
    yield
    _Graph.current = None


def test_every_step_has_its_own_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(repeated, "capturing", _capturing)
    found: list[tuple[int, float, float]] = []
    applied = 0

    def new(verdict: Verdict, rule: ParameterRule) -> Tensor:
        return torch.tensor([float(verdict.number), rule.weight_decay])

    def apply(layer: int, factors: Factors) -> None:
        nonlocal applied
        applied += 1
        for rule in (DECAYED, PLAIN):
            place = factors(rule)

            def kernel(place: Tensor = place) -> None:
                number, decay = place.tolist()
                found.append((layer, number, decay))

            (_Graph.current.work.append if _Graph.current else lambda work: work())(kernel)

    updates = RepeatedUpdates(new)
    for number in range(1, 6):
        verdict = Verdict(learning_rate=0.1, number=number)
        for action in ACTIONS:
            updates.run(action, verdict, partial(apply, action.layer))
    assert applied == 2 * len(ACTIONS)  # once plainly, once captured
    assert found == [
        (action.layer, float(number), decay)
        for number in range(1, 6)
        for action in ACTIONS
        for decay in (0.5, 0.0)
    ]
