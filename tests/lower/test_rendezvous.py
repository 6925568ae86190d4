"""Pipelines end also where a send waits until its message is taken, as gloo's and NCCL's may."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import given, settings

from bigplan.content import HeldContent
from bigplan.order import order_of
from bigplan.program import Action, Instruction, Lane, Op, Program, expand, held
from tests.examples import examples
from tests.toys import Case, cases

MESSAGES = (Op.SEND, Op.RECV)
Place = tuple[int, int]  # stage, and the action's number in its program


class _Play:
    """All stages at once: an action runs when its lane and what it waits for have ended."""

    def __init__(self, programs: Sequence[Program], parts: Sequence[tuple[Instruction, ...]]):
        self.actions: dict[Place, tuple[Action, list[Place]]] = {}
        self.lanes: dict[tuple[int, Lane], deque[Place]] = {}
        self.done: set[Place] = set()
        self.stages = len(programs)
        for stage, (program, part) in enumerate(zip(programs, parts, strict=True)):
            for number, (action, waits) in enumerate(order_of(program.buffers, expand(part))):
                place = stage, number
                self.actions[place] = action, [(stage, wait) for wait in waits]
                self.lanes.setdefault((stage, action.lane), deque()).append(place)

    def ready(self, place: Place) -> bool:
        return all(wait in self.done for wait in self.actions[place][1])

    def heads(self) -> list[Place]:
        return [lane[0] for lane in self.lanes.values() if lane and self.ready(lane[0])]

    def end(self, place: Place) -> None:
        action, _ = self.actions[place]
        assert self.lanes[place[0], action.lane].popleft() == place
        self.done.add(place)

    def message(self, place: Place) -> HeldContent:
        """What is sent or taken."""
        action = self.actions[place][0]
        ref = (action.reads if action.op is Op.SEND else action.writes)[0]
        return held(ref, action.micro_batch)

    def run(self) -> None:
        moved = True
        while moved:
            heads = self.heads()
            waiting = [p for p in heads if self.actions[p][0].op in MESSAGES]
            free = [p for p in heads if p not in waiting]
            for place in free:
                self.end(place)
            pairs = self.meetings(waiting)
            for sender, receiver in pairs:
                self.end(sender)
                self.end(receiver)
            moved = bool(free or pairs)

    def meetings(self, waiting: Sequence[Place]) -> list[tuple[Place, Place]]:
        """Sends whose receiver is ready as well."""
        by_op = {op: [p for p in waiting if self.actions[p][0].op is op] for op in MESSAGES}
        receivers = {self.message(place): place for place in by_op[Op.RECV]}
        senders = {self.message(place): place for place in by_op[Op.SEND]}
        return [(senders[message], receivers[message]) for message in senders.keys() & receivers]

    @property
    def stuck(self) -> list[str]:
        left = [lane[0] for lane in self.lanes.values() if lane]
        return [f"stage {p[0]}: {self.actions[p][0].op} {self.actions[p][0].layer}" for p in left]


@settings(max_examples=examples(60))
@given(cases(stages=(2, 4), free=True))
def test_no_send_waits_for_a_receive_that_waits_for_it(case: Case) -> None:
    programs = case.programs
    for part in ("first", "step", "evaluate"):
        play = _Play(programs, [getattr(program, part) for program in programs])
        play.run()
        assert not play.stuck
