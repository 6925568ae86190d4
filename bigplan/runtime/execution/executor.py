"""Executes a rank's program: submits its actions in order, each behind what it depends on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain

import torch

from bigplan.order import Order, order_of
from bigplan.placement import Tier
from bigplan.program import Action, Instruction, Lane, Op, Ref, expand
from bigplan.runtime.checkpoint import Saver
from bigplan.runtime.context import Context
from bigplan.runtime.execution.compute import Compute
from bigplan.runtime.execution.graphs import Graphs
from bigplan.runtime.execution.lanes import ON_STREAMS, Done, LaneClock, Lanes, finish, read_ahead
from bigplan.runtime.execution.moves import (
    gather,
    move,
    receive,
    reduce,
    send,
    sum_replicas,
    tensor_reduce,
)
from bigplan.runtime.execution.streaming import state_in, state_out
from bigplan.runtime.execution.turns import Turns
from bigplan.runtime.execution.update import Update
from bigplan.runtime.layers.kept import KeptActivations
from bigplan.runtime.layers.lookup import look_up
from bigplan.runtime.result import Progress
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
        self.saver: Saver | None = None  # the checkpoint that CKPT actions write
        self._graphs = Graphs(context, compute)
        self._does = self._table()
        idle = frozenset[Op]() if poison else frozenset((Op.FREE,))  # else it fills what it frees
        self._lanes = Lanes(context.device, self._run, context.program.captured, idle)
        self._unfinished: list[Done] = []  # a checkpoint's actions that outlast their step
        self._playing: list[Done] = []
        self._played = 0  # actions of the programs before
        self._kept_order: tuple[tuple[Instruction, ...], Order] | None = None

    def _table(self) -> Mapping[Op, Callable[[Action], None]]:
        """What executes each op; none is left to a default."""
        context, compute, update, turns = self._context, self._compute, self._update, Turns()
        copy = partial(move, context, turns, self._kept)
        return {
            Op.DATA: compute.data,
            Op.READ: copy,
            Op.LOOK_UP: partial(look_up, context),
            Op.LOAD: copy,
            Op.GATHER: partial(gather, context),
            Op.FORWARD: self._graphs.run,
            Op.SAVE: copy,
            Op.FETCH: copy,
            Op.BACKWARD: self._graphs.run,
            Op.TENSOR_REDUCE: partial(tensor_reduce, context),
            Op.REDUCE: partial(reduce, context),
            Op.SUM_REPLICAS: partial(sum_replicas, context),
            Op.GRAD_OUT: copy,
            Op.PARAM_OUT: copy,
            Op.ACCUMULATE: update.accumulate,
            Op.NORM: update.norm,
            Op.CLIP: lambda _: update.clip(),
            Op.STATE_IN: partial(state_in, context),
            Op.UPDATE: update.update,
            Op.STATE_OUT: partial(state_out, context, turns),
            Op.WRITE: copy,
            Op.SEND: partial(send, context),
            Op.RECV: self._receive,
            Op.FREE: lambda _: None,
            Op.CKPT: self._write,
        }

    def play(self, instructions: tuple[Instruction, ...]) -> Timeline:
        """Run all actions to their end, but for those of a checkpoint, which may go on.

        Checkpoint actions under way count as this program's first actions. So every action that
        changes the pieces that they still read waits for them. Raises the first error of any
        action.
        """
        order, before = self._order(instructions), self._unfinished
        clock, started = LaneClock.now(self._context.device), list(before)
        for action, waits in order[len(before) :]:
            started.append(Done(action, [started[number] for number in waits]))
        self._playing = started
        self._graphs.begin(done.action for done in started)
        self._lanes.start(started[len(before) :])
        stage = self._context.program.stage
        read_ahead([done for done in started if done.action.op is not Op.CKPT], clock, stage)
        ended = [done.issued for done in started]  # asked once: each is in one step's times
        every = list(zip(started, ended, strict=True))
        self._unfinished = [done for done, end in every if not end]
        self._playing, self._played = [], self._played + len(started)
        return finish([done for done, end in every if end], clock, stage)

    def progress(self) -> Progress:
        """How far it is; any thread may ask. Of every lane the first action that is not issued."""
        playing, played = self._playing, self._played
        under_way: dict[Lane, Action] = {}
        for done in playing:
            if not done.issued:
                under_way.setdefault(done.action.lane, done.action)
        ended = played + sum(done.issued for done in playing)
        told = (f"{action.op.value} of layer {action.layer}" for action in under_way.values())
        return Progress(ended, tuple(told))

    def _order(self, instructions: tuple[Instruction, ...]) -> Order:
        """What the actions wait for, those of a checkpoint under way first; kept without those."""
        buffers = self._context.program.buffers
        if self._unfinished:
            before = (done.action for done in self._unfinished)
            return order_of(buffers, chain(before, expand(instructions)))
        if self._kept_order is None or self._kept_order[0] is not instructions:
            self._kept_order = instructions, order_of(buffers, expand(instructions))
            if self._context.device.type == "cuda":
                # What is there by now stays: torch's modules and all actions. A collection that
                # looks through these for cycles stops a step for 0.1 to 0.2 s.
                gc.collect()
                gc.freeze()
        return self._kept_order[1]

    def settle(self) -> None:
        """Wait until no action of a checkpoint is under way. Raises the first error of any."""
        unfinished, self._unfinished = self._unfinished, []
        for done in unfinished:
            done.check()

    def close(self) -> None:
        """Join the lanes, and give the memory of graphs back. Nothing plays any more.

        Methods of this object in its own table and in its lanes are cycles: communicators, with
        three threads each, would wait for Python's collector.
        """
        self._lanes.close()
        self._graphs.close()
        del self._does, self._lanes

    def _run(self, action: Action) -> None:
        self._does[action.op](action)
        if self._poison:
            for ref in action.frees:
                self._spoil(action, ref)

    def _spoil(self, action: Action, ref: Ref) -> None:
        """Fill an entry with NaN: after the copies out of it, before what waits for the action.

        A stream only orders fills of device memory. Fills of host memory run at once, while copies
        that the stream waits for may be under way. A lane without a stream uses the default stream,
        for which nothing waits.
        """
        on_gpu = self._context.program.buffers[ref.buffer].tier is Tier.GPU
        ordered = self._context.device.type == "cpu" or on_gpu == (action.lane in ON_STREAMS)
        if not ordered:
            torch.cuda.current_stream().synchronize()
        self._context.memory.poison(self._context.entries.key(ref, action))
        if not ordered:
            torch.cuda.current_stream().synchronize()

    def _write(self, action: Action) -> None:
        assert self.saver is not None, "a program with CKPT needs a checkpoint to write"
        self.saver.write(action)

    def _kept(self, action: Action) -> KeptActivations:
        return self._compute.kept[action.layer, action.micro_batch]

    def _receive(self, action: Action) -> None:
        receive(self._context, self._lanes.streams.get(Lane.COMPUTE), action)
