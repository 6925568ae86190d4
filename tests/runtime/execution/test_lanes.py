"""Lanes keep order and dependencies, and stop at the first error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from bigplan.mechanics import ACTIONS_AHEAD
from bigplan.order import Order, order_of
from bigplan.plan import Plan
from bigplan.program import Action, Lane, Op, expand
from bigplan.runtime.execution import lanes as lanes_module
from bigplan.runtime.execution.lanes import (
    Done,
    LaneClock,
    Lanes,
    StoppedError,
    finish,
    read_ahead,
    thread_of,
)
from bigplan.timeline import Timeline
from tests.examples import examples
from tests.runtime.harness import context_of, started
from tests.runtime.plans import plans

CPU = torch.device("cpu")
LANES = (Lane.COMPUTE, Lane.H2D, Lane.CPU)


def _action(lane: Lane, number: int = 0) -> Action:
    return Action(Op.FREE, lane, number)


def _lanes(run: Callable[[Action], None]) -> Lanes:
    return Lanes(CPU, run)


@st.composite
def graphs(draw: st.DrawFn) -> list[tuple[Lane, list[int]]]:
    """Actions on lanes, each waiting for some earlier ones."""
    count = draw(st.integers(1, 12))
    lanes = st.sampled_from(LANES)
    waits = [st.lists(st.integers(0, i - 1), max_size=3) for i in range(1, count)]
    return [(draw(lanes), []), *((draw(lanes), draw(some)) for some in waits)]


@given(graphs())
@settings(max_examples=examples(50), derandomize=True, deadline=None)
def test_actions_start_after_their_lane_and_their_waits(
    graph: list[tuple[Lane, list[int]]],
) -> None:
    ran: list[int] = []
    lanes = _lanes(lambda action: ran.append(action.layer))
    clock, done = LaneClock.now(CPU), list[Done]()
    for number, (lane, waits) in enumerate(graph):
        done.append(Done(_action(lane, number), [done[i] for i in waits]))
    lanes.start(done)
    read_ahead(done, clock, stage=0)
    read = [action.event for action in done]
    timeline = finish(done, clock, stage=0)
    lanes.close()
    assert list(timeline.events) == read
    assert sorted(ran) == list(range(len(graph)))
    for number, (lane, waits) in enumerate(graph):
        event = timeline.events[number]
        assert (event.layer, event.lane) == (number, lane.value)
        before = [i for i in range(number) if graph[i][0] is lane] + waits
        assert all(timeline.events[i].end <= event.start for i in before)
        assert 0 <= event.start <= event.end <= timeline.seconds


def test_lanes_run_beside_each_other() -> None:
    """Each of two actions waits for the other to have started."""
    meeting = threading.Barrier(2, timeout=100)

    def run(_: Action) -> None:
        meeting.wait()

    lanes = _lanes(run)
    done = [Done(_action(lane)) for lane in LANES[:2]]
    lanes.start(done)
    finish(done, LaneClock.now(CPU), 0)
    lanes.close()


def test_an_error_reaches_the_step_and_nothing_runs_after_it() -> None:
    ran: list[int] = []

    def run(action: Action) -> None:
        if action.layer == 1:
            raise ValueError("broken")
        ran.append(action.layer)

    lanes = _lanes(run)
    clock, done = LaneClock.now(CPU), list[Done]()
    for number, lane in enumerate([Lane.COMPUTE, Lane.COMPUTE, Lane.H2D, Lane.COMPUTE]):
        done.append(Done(_action(lane, number), done[-1:]))
    lanes.start(done)
    read_ahead(done, clock, 0)  # of those that ran
    assert [action.event is None for action in done] == [False, True, True, True]
    with pytest.raises(ValueError, match="broken"):
        finish(done, clock, 0)
    assert ran == [0]
    later = Done(_action(Lane.CPU, 9))  # of another lane, waiting for nothing
    lanes.start([later])
    with pytest.raises(ValueError, match="broken"):
        finish([later], clock, 0)
    lanes.close()
    assert ran == [0]


class _Stream:
    """Of a device that has done an action once somebody has waited for its end."""

    def __init__(self) -> None:
        self.unfinished: list[_End] = []

    def wait_event(self, _: object) -> None:
        """The device's matter."""


class _End:
    def __init__(self, stream: _Stream) -> None:
        self.stream = stream
        stream.unfinished.append(self)

    def synchronize(self) -> None:
        """In a stream's order: those before have ended, too."""
        before = self.stream.unfinished
        del before[: before.index(self) + 1 if self in before else 0]


def test_chunks_are_queued_one_at_a_time_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: dict[Lane, _Stream] = {}
    threads: dict[Lane, set[int]] = {}
    most: dict[Lane, int] = {}

    def run(action: Action) -> None:
        lane = action.lane
        threads.setdefault(lane, set()).add(threading.get_ident())
        # Of two marks an action; the second is made when it has been queued.
        most[lane] = max(most.get(lane, 0), len(streams[lane].unfinished) // 2)

    monkeypatch.setattr(
        lanes_module, "_stream", lambda _, lane: streams.setdefault(lane, _Stream())
    )
    monkeypatch.setattr(lanes_module, "_mark", _End)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    passing = (Lane.STATE_IN, Lane.GPU_UPDATE, Lane.STATE_OUT)
    done: list[Done] = []
    for number in range(3 * ACTIONS_AHEAD):
        for lane in (*passing, Lane.COMPUTE):
            done.append(Done(_action(lane, number), done[-1:]))
    lanes = Lanes(torch.device("cuda"), run)
    lanes.start(done)
    finish(done, LaneClock(time.perf_counter()), 0)
    lanes.close()
    assert len(set.union(*(threads[lane] for lane in passing))) == 1
    assert most == dict.fromkeys((*passing, Lane.COMPUTE), ACTIONS_AHEAD - 1) | {Lane.STATE_IN: 0}


def test_what_queues_nothing_ends_with_the_action_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no event of its own, unless it is the first of its lane or waits for another lane."""
    monkeypatch.setattr(lanes_module, "_stream", lambda *_: _Stream())
    monkeypatch.setattr(lanes_module, "_mark", _End)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    first, load = Done(_action(Lane.COMPUTE)), Done(Action(Op.LOAD, Lane.H2D, 0))
    passing = Done(Action(Op.FORWARD, Lane.COMPUTE, 0))
    free, again = (Done(_action(Lane.COMPUTE, number)) for number in (1, 2))
    behind = Done(_action(Lane.COMPUTE, 3), [load])
    waiting = Done(Action(Op.LOAD, Lane.H2D, 1), [again])
    done = [first, load, passing, free, again, behind, waiting]
    lanes = Lanes(torch.device("cuda"), lambda _: None, idle={Op.FREE})
    lanes.start(done)
    for action in done:
        action.check()
    lanes.close()
    assert free.start is free.end is again.start is again.end is passing.end
    own = [end for one in (first, load, passing, behind, waiting) for end in (one.start, one.end)]
    assert None not in own
    assert len(set(map(id, own))) == 2 * 5


def test_one_thread_queues_captured_passes_and_what_stays_on_the_gpu() -> None:
    beside = {Lane.DATA, Lane.CPU, Lane.CHECKPOINT, Lane.NVME_READ}
    staying = {Lane.COMPUTE, Lane.COMM, Lane.GPU_UPDATE}
    expected = dict.fromkeys(staying, Lane.COMPUTE) | {lane: lane for lane in beside}
    assert thread_of(staying | beside, captured=True) == expected
    apart = thread_of(staying | beside, captured=False)
    assert apart == {lane: lane for lane in staying | beside} | {Lane.GPU_UPDATE: Lane.STATE_IN}


@pytest.mark.parametrize("leaves", [Lane.H2D, Lane.D2H, Lane.STATE_OUT, Lane.SEND, Lane.RECV])
def test_where_something_leaves_the_gpu_collectives_have_a_thread_of_their_own(
    leaves: Lane,
) -> None:
    """It may wait on the host for what leaves, while passes go on."""
    threads = thread_of({Lane.COMPUTE, Lane.COMM, Lane.GPU_UPDATE, leaves}, captured=True)
    assert threads[Lane.COMPUTE] is Lane.COMPUTE
    assert threads[Lane.COMM] is Lane.COMM
    assert threads[Lane.GPU_UPDATE] is Lane.STATE_IN


@pytest.mark.gpu
def test_a_lane_queues_a_few_actions_ahead_of_the_device() -> None:
    device, ahead = torch.device("cuda"), list[int]()
    done = [Done(_action(Lane.COMPUTE, number)) for number in range(5 * ACTIONS_AHEAD)]

    def run(action: Action) -> None:
        ends = [earlier.end for earlier in done[: action.layer]]
        queued = [end for end in ends if end is not None and not end.query()]  # type: ignore[no-untyped-call]
        ahead.append(len(queued))
        torch.cuda._sleep(5_000_000)  # type: ignore[no-untyped-call] # cycles: three milliseconds

    lanes = Lanes(device, run)
    clock = LaneClock.now(device)
    lanes.start(done)
    finish(done, clock, 0)
    lanes.close()
    assert 1 < max(ahead) < ACTIONS_AHEAD + 1


def test_closing_with_work_queued_does_not_wait_for_ever() -> None:
    """An action of one lane waits for one of another that never ran."""
    running, release = threading.Event(), threading.Event()

    def run(_: Action) -> None:
        running.set()
        release.wait(100)

    lanes = _lanes(run)
    first, queued = Done(_action(Lane.COMPUTE, 0)), Done(_action(Lane.COMPUTE, 1))
    waiting = Done(_action(Lane.H2D, 2), [queued])
    lanes.start([first, queued, waiting])
    assert running.wait(100)
    closing = threading.Thread(target=lanes.close)
    closing.start()
    while lanes.failed is None:  # until it has begun to close
        time.sleep(0.001)
    release.set()
    closing.join(50)
    assert not closing.is_alive()
    first.check()
    for done in (queued, waiting):
        with pytest.raises(StoppedError):
            done.check()


@given(plans(precisions=("fp32",)))
@settings(max_examples=examples(6), derandomize=True, deadline=None)
def test_measured_events_keep_the_programs_order(plan: Plan) -> None:
    with started(plan) as worker:
        program = context_of(worker).program
        for instructions in (program.first, program.step):
            timeline = worker.step().timeline
            _check_order(timeline, order_of(program.buffers, expand(instructions)))


def _check_order(timeline: Timeline, order: Order) -> None:
    assert len(timeline.events) == len(order)
    last: dict[Lane, float] = {}
    for event, (action, waits) in zip(timeline.events, order, strict=True):
        assert (event.op, event.lane) == (action.op.value, action.lane.value)
        assert (event.layer, event.micro_batch) == (action.layer, action.micro_batch)
        before = [timeline.events[number].end for number in waits]
        assert event.start >= max([last.get(action.lane, 0.0), *before])
        last[action.lane] = event.end
    assert timeline.seconds == max(event.end for event in timeline.events)
