"""Every op has an entry of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

pytest.importorskip("torch")

from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement
from bigplan.program import Action, Op
from tests.runtime.harness import started
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training


def test_every_op_is_executed() -> None:
    one, two = KindPlacement.on_gpu(1), KindPlacement.on_gpu(2)
    where = placed(embedding=one, block=two, head=one)
    with started(plan_of(tiny_model(), tiny_training(1), Strategy(dp=1), where)) as worker:
        does: Mapping[Op, Callable[[Action], None]] = worker._running().executor._does
        assert set(does) == set(Op)
