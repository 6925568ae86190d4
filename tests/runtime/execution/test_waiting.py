"""Time without data is told from time without parameters and time at work."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from bigplan.program import Lane, Op
from bigplan.runtime.execution.waiting import data_seconds
from bigplan.timeline import Event, Timeline


def _event(lane: Lane, op: Op, micro_batch: int, start: float, end: float) -> Event:
    return Event(0, lane.value, op.value, 0, micro_batch, start, end)


def _seconds(*events: Event) -> float:
    return data_seconds(Timeline(events, max(event.end for event in events)))


def test_a_batch_that_is_there_in_time_costs_nothing() -> None:
    assert _seconds(
        _event(Lane.DATA, Op.DATA, 0, 0.0, 0.0),
        _event(Lane.DATA, Op.DATA, 1, 0.0, 1.0),
        _event(Lane.COMPUTE, Op.FORWARD, 0, 0.0, 2.0),
        _event(Lane.COMPUTE, Op.FORWARD, 1, 2.0, 4.0),
    ) == pytest.approx(0.0)


def test_late_batches_add_up() -> None:
    assert _seconds(
        _event(Lane.DATA, Op.DATA, 0, 0.0, 3.0),
        _event(Lane.DATA, Op.DATA, 1, 3.0, 5.5),
        _event(Lane.COMPUTE, Op.FORWARD, 0, 3.0, 5.0),
        _event(Lane.COMPUTE, Op.FORWARD, 1, 5.5, 6.0),
    ) == pytest.approx(3.5)


def test_what_parameters_keep_waiting_is_not_for_data() -> None:
    """Parameters at 2, the batch at 3: a second of three; parameters at 4: nothing."""
    late = _event(Lane.DATA, Op.DATA, 0, 0.0, 3.0)
    assert _seconds(
        late,
        _event(Lane.H2D, Op.LOAD, -1, 0.0, 2.0),
        _event(Lane.COMPUTE, Op.FORWARD, 0, 3.0, 4.0),
    ) == pytest.approx(1.0)
    assert _seconds(
        late,
        _event(Lane.H2D, Op.LOAD, -1, 0.0, 4.0),
        _event(Lane.COMPUTE, Op.FORWARD, 0, 4.0, 5.0),
    ) == pytest.approx(0.0)


def test_rows_that_come_behind_a_late_batch_are_waited_for_with_it() -> None:
    """Parameters at 1, the batch at 3, its rows of the table at 3.5: two seconds of data."""
    assert _seconds(
        _event(Lane.CPU, Op.UPDATE, -1, 0.0, 1.0),
        _event(Lane.DATA, Op.DATA, 0, 0.0, 3.0),
        _event(Lane.DATA, Op.LOOK_UP, 0, 3.0, 3.3),
        _event(Lane.H2D, Op.LOAD, 0, 3.3, 3.5),
        _event(Lane.COMPUTE, Op.FORWARD, 0, 3.5, 4.0),
    ) == pytest.approx(2.0)
