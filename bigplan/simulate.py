"""The program priced and played: when every action of a step starts and ends.

Lanes run their actions in program order; an action starts when its lane is free and the actions it
depends on have ended. Nothing here knows how the solver estimated the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bigplan.cost import Costs
from bigplan.errors import VerificationError
from bigplan.graph.graph import Graph
from bigplan.placement import Tier
from bigplan.program import Action, Dependencies, Instruction, Lane, Op, Program, expand
from bigplan.timeline import Event, Timeline

MOVES = {
    Lane.H2D: "h2d",
    Lane.D2H: "d2h",
    Lane.NVME_READ: "nvme_read",
    Lane.NVME_WRITE: "nvme_write",
}


def action_seconds(action: Action, graph: Graph, costs: Costs) -> float:
    """Seconds an action holds its lane."""
    rates, kind = costs.rates, costs.kinds[graph.layers[action.layer]]
    if action.lane in MOVES:
        return rates.latency + action.amount / float(getattr(rates, MOVES[action.lane]))
    on_gpu = action.lane is Lane.COMPUTE
    memory = rates.device_memory if on_gpu else rates.host_memory
    match action.op:
        case Op.FORWARD:
            return kind.forward
        case Op.BACKWARD:
            return kind.backward + (kind.forward if action.recompute else 0.0)
        case Op.UPDATE:
            rate = rates.gpu_update if action.piece is Tier.GPU else rates.cpu_update
            return action.amount / rate
        case Op.ACCUMULATE:
            return 3 * action.amount / memory  # read both, write the sum
        case Op.NORM:
            return action.amount / memory
        case Op.REDUCE:
            return kind.reduce
        case Op.GATHER:
            return kind.gather
        case Op.SEND:
            return costs.send
        case _:
            return 0.0


@dataclass(slots=True)
class _Rank:
    """One role on its way through its program."""

    program: Program
    actions: Iterator[Action]
    waits: Dependencies
    ends: list[float] = field(default_factory=list)
    lanes: dict[Lane, float] = field(default_factory=dict)
    pending: Action | None = None
    sent: dict[tuple[str, int], float] = field(default_factory=dict)


def simulate(programs: Sequence[Program], graph: Graph, costs: Costs) -> Timeline:
    """One steady step of every stage, messages between neighbours matched.

    Raises VerificationError where stages wait for each other for ever.
    """
    ranks = [_rank(program, program.step) for program in programs]
    events: list[Event] = []
    moving = True
    while moving:
        moving = False
        for rank in ranks:
            moving |= _run_until_blocked(rank, ranks, (graph, costs), events)
    stuck = [rank.program.stage for rank in ranks if rank.pending is not None]
    if stuck:
        raise VerificationError(f"stages {stuck} wait for messages that are never sent")
    return Timeline(tuple(events), max((event.end for event in events), default=0.0))


def _rank(program: Program, instructions: tuple[Instruction, ...]) -> _Rank:
    actions = expand(instructions)
    rank = _Rank(program, actions, Dependencies(program.buffers))
    rank.pending = next(actions, None)
    return rank


def _run_until_blocked(
    rank: _Rank, ranks: list[_Rank], prices: tuple[Graph, Costs], events: list[Event]
) -> bool:
    moved = False
    while (action := rank.pending) is not None:
        arrival = _arrival(action, rank.program.stage, ranks) if action.op is Op.RECV else 0.0
        if arrival is None:
            return moved
        waits = rank.waits.add(action)
        ready = max((rank.ends[number] for number in waits), default=0.0)
        start = max(rank.lanes.get(action.lane, 0.0), ready, arrival)
        end = start + action_seconds(action, *prices)
        rank.ends.append(end)
        rank.lanes[action.lane] = end
        if action.op is Op.SEND:
            rank.sent[action.reads[0].content, action.micro_batch] = end
        if action.op is not Op.FREE:
            events.append(_event(action, rank.program.stage, start, end))
        rank.pending = next(rank.actions, None)
        moved = True
    return moved


def _arrival(action: Action, stage: int, ranks: list[_Rank]) -> float | None:
    """When the message was sent whole by a neighbour; None: not yet."""
    key = (action.writes[0].content, action.micro_batch)
    neighbours = [ranks[i] for i in (stage - 1, stage + 1) if 0 <= i < len(ranks)]
    return next((rank.sent[key] for rank in neighbours if key in rank.sent), None)


def _event(action: Action, stage: int, start: float, end: float) -> Event:
    return Event(
        stage, action.lane.value, action.op.value, action.layer, action.micro_batch, start, end
    )
