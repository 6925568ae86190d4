"""Every op has an entry of its own, and what is not executed is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

pytest.importorskip("torch")

from bigplan.errors import RefusedError
from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement
from bigplan.program import Action, Lane, Op
from tests.runtime.harness import started
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training

NOT_EXECUTED = {Op.SEND: Lane.SEND, Op.RECV: Lane.RECV}


def test_every_op_is_executed_or_refused() -> None:
    one, two = KindPlacement.on_gpu(1), KindPlacement.on_gpu(2)
    where = placed(embedding=one, block=two, head=one)
    with started(plan_of(tiny_model(), tiny_training(1), Strategy(dp=1), where)) as worker:
        does: Mapping[Op, Callable[[Action], None]] = worker._running().executor._does
        assert set(does) == set(Op)
        for op, lane in NOT_EXECUTED.items():
            with pytest.raises(RefusedError, match=f"{op} of layer 1"):
                does[op](Action(op, lane, 1))
