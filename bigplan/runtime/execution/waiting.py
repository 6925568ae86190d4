"""How long compute stood still for want of data, from what a step's timeline shows."""

from __future__ import annotations

from bigplan.program import Lane, Op
from bigplan.timeline import Timeline

BRINGS = (Op.LOAD, Op.GATHER, Op.UPDATE)  # what else the first layer's forward may wait for


def data_seconds(timeline: Timeline) -> float:
    """Seconds for which nothing but its batch kept the first layer's forward from starting.

    The forward could start when the action before it on its lane had ended and the layer's
    parameters were there. The batch came this much later.
    """
    came = {e.micro_batch: e.end for e in timeline.events if e.op == Op.DATA}
    parameters = [e for e in timeline.events if e.layer == 0 and e.op in BRINGS]
    brought = [e.end for e in parameters if e.micro_batch < 0]  # rows come behind their batch
    compute = [e for e in timeline.events if e.lane == Lane.COMPUTE]
    waited = free = 0.0
    for event in sorted(compute, key=lambda e: (e.start, e.end)):
        if event.op == Op.FORWARD and event.layer == 0:
            ready = max([free, *(end for end in brought if end <= event.start)])
            waited += max(0.0, min(came[event.micro_batch], event.start) - ready)
        free = max(free, event.end)
    return waited
