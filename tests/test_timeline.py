from __future__ import annotations

import json

from bigplan.timeline import Event, Timeline

EVENTS = (
    Event(0, "gpu compute", "forward", 1, 0, 0.0, 2.0),
    Event(0, "host to device", "load", 2, -1, 0.5, 1.0),
    Event(0, "gpu compute", "backward", 1, 0, 2.0, 5.0),
    Event(1, "gpu compute", "forward", 3, 0, 2.0, 3.0),
)
TIMELINE = Timeline(EVENTS, 5.0)


def test_totals() -> None:
    assert EVENTS[1].seconds == 0.5
    assert TIMELINE.total_by(lambda event: event.op) == {
        "forward": 3.0,
        "load": 0.5,
        "backward": 3.0,
    }
    assert TIMELINE.busy() == {"gpu compute": 5.0, "host to device": 0.5}
    assert Timeline((), 0.0).busy() == {}


def test_chrome_trace() -> None:
    trace = json.loads(json.dumps(TIMELINE.to_chrome()))["traceEvents"]
    names = [e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "process_name"]
    assert names == ["stage 0", "stage 1"]
    drawn = [event for event in trace if event["ph"] == "X"]
    assert len(drawn) == len(EVENTS)
    assert drawn[1] == {
        "ph": "X",
        "name": "load 2",
        "cat": "load",
        "pid": 0,
        "tid": 1,
        "ts": 0.5e6,
        "dur": 0.5e6,
        "args": {"layer": 2, "micro_batch": -1},
    }
    lanes = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert lanes == {0: "gpu compute", 1: "host to device"}


def test_stages_of_a_step_are_one_timeline() -> None:
    first = Timeline((Event(0, "gpu compute", "forward", 0, 0, 0.0, 1.0),), 1.5)
    second = Timeline((Event(1, "gpu compute", "forward", 1, 0, 1.0, 2.0),), 2.5)
    together = Timeline.together([first, second])
    assert [event.stage for event in together.events] == [0, 1]
    assert together.seconds == 2.5
