"""Every op has an entry of its own, and what runs is told to whoever asks."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from bigplan.graph.strategy import Strategy
from bigplan.placement import KindPlacement
from bigplan.plan import Plan
from bigplan.program import Action, Op
from bigplan.runtime.result import Progress
from tests.runtime.harness import started
from tests.runtime.plans import placed, plan_of, tiny_model, tiny_training


def _plan() -> Plan:
    one, two = KindPlacement.on_gpu(1), KindPlacement.on_gpu(2)
    where = placed(embedding=one, block=two, head=one)
    return plan_of(tiny_model(), tiny_training(1), Strategy(dp=1), where)


def test_every_op_is_executed() -> None:
    with started(_plan()) as worker:
        does: Mapping[Op, Callable[[Action], None]] = worker._running().executor._does
        assert set(does) == set(Op)


def test_progress_is_told_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the first block's backward, and when all is done."""
    with started(_plan()) as worker:
        executor = worker._running().executor
        arrived, asked = threading.Event(), threading.Event()
        usual = executor._does[Op.BACKWARD]

        def held(action: Action) -> None:
            if action.layer == 1:
                arrived.set()
                assert asked.wait(60)
            usual(action)

        monkeypatch.setattr(executor, "_does", {**executor._does, Op.BACKWARD: held})
        assert worker.progress() == Progress()
        with ThreadPoolExecutor(1) as thread:
            step = thread.submit(worker.step)
            assert arrived.wait(60)
            during = worker.progress()
            asked.set()
            step.result()
        assert "backward of layer 1" in during.doing
        after = worker.progress()
        assert 0 < during.ended < after.ended
        assert not after.doing


def test_a_closed_worker_leaves_nothing_to_the_collector_of_cycles() -> None:
    """Communicators end with the context; of gloo's each has three threads."""
    gc.disable()
    try:
        with started(_plan()) as worker:
            worker.step()
            executor = weakref.ref(worker._running().executor)
            compute = weakref.ref(worker._running().compute)
        assert executor() is None
        assert compute() is None
    finally:
        gc.enable()
