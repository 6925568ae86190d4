"""Executes a rank's program: submits its actions in order, each behind what it depends on."""

from __future__ import annotations

from bigplan.program import Action, Dependencies, Instruction, Op, expand
from bigplan.runtime.compute import Compute
from bigplan.runtime.context import Context
from bigplan.runtime.kept import Kept
from bigplan.runtime.lanes import Clock, Done, Lanes, finish
from bigplan.runtime.moves import move, reduce
from bigplan.runtime.update import Update
from bigplan.timeline import Timeline


class Executor:
    """Plays instructions on this machine's lanes; decides nothing."""

    def __init__(
        self, context: Context, compute: Compute, update: Update, *, poison: bool = False
    ) -> None:
        self._context = context
        self._compute = compute
        self._update = update
        self._poison = poison
        self._lanes = Lanes(context.device, self._run)

    def play(self, instructions: tuple[Instruction, ...]) -> Timeline:
        """Run all actions to their end. Raises the first error of any of them."""
        waits = Dependencies(self._context.program.buffers)
        clock = Clock.now(self._context.device)
        started: list[Done] = []
        for action in expand(instructions):
            before = [started[number] for number in waits.add(action)]
            started.append(self._lanes.submit(action, before))
        return finish(started, clock, self._context.program.stage)

    def close(self) -> None:
        """Join the lanes."""
        self._lanes.close()

    def _run(self, action: Action) -> None:
        match action.op:
            case Op.FORWARD:
                self._compute.forward(action)
            case Op.BACKWARD:
                self._compute.backward(action)
            case Op.NORM:
                self._update.norm(action)
            case Op.CLIP:
                self._update.clip()
            case Op.UPDATE:
                self._update.update(action)
            case Op.ACCUMULATE:
                self._update.accumulate(action)
            case Op.REDUCE:
                reduce(self._context, action)
            case Op.FREE:
                pass
            case _:
                move(self._context, action, self._kept)
        if self._poison:
            for ref in action.frees:
                self._context.memory.poison(self._context.key(ref, action))

    def _kept(self, action: Action) -> Kept:
        return self._compute.kept[action.layer, action.micro_batch]
