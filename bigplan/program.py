"""The program: what one rank of a role does in one optimizer step, as a static list of actions.

The simulator prices the list, the verifier checks it and the runtime executes it. Actions name the
buffers they read, write and free, so all three derive the same order from the same data: an action
may start when its lane is free, what it reads has been written, and what it overwrites is no longer
read. Micro-batches are repeat blocks, so a thousand of them are not a thousand copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from bigplan.content import Content, Held
from bigplan.graph.graph import Recompute
from bigplan.placement import LayerPlacement, Share, Tier


class Op(StrEnum):
    """What an action does."""

    DATA = "data"  # a micro-batch's tokens and targets into host memory
    READ = "read"  # NVMe to host
    LOOK_UP = "look_up"  # rows of a table in host memory, into staging
    LOAD = "load"  # host to GPU: parameters
    GATHER = "gather"  # all-gather of a layer's parameters over the data-parallel group
    FORWARD = "forward"
    SAVE = "save"  # GPU to host: activations
    FETCH = "fetch"  # host to GPU: activations
    BACKWARD = "backward"
    REDUCE = "reduce"  # all-reduce or reduce-scatter of a layer's gradients
    GRAD_OUT = "grad_out"  # GPU to host: gradients
    PARAM_OUT = "param_out"  # GPU to host: parameters that a CPU update changes in place
    ACCUMULATE = "accumulate"  # add a unit's gradients to their sum in host memory
    NORM = "norm"  # square sum of a layer's final gradients
    CLIP = "clip"  # all square sums to the clip factor
    STATE_IN = "state_in"  # host to GPU: a chunk of optimizer state with its gradients
    UPDATE = "update"  # the optimizer on one share of a layer, or a chunk of it
    STATE_OUT = "state_out"  # GPU to host: the chunk, and the parameters that it was updated with
    WRITE = "write"  # host to NVMe
    SEND = "send"
    RECV = "recv"
    FREE = "free"
    CKPT = "ckpt"  # write a piece of a layer's state to the checkpoint


ROWS, STAGED_ROWS = "rows", "stage.r"  # rings of rows that are looked up in tables on the host


class Lane(StrEnum):
    """A queue whose actions run one after the other, in program order."""

    COMPUTE = "gpu compute"
    GPU_UPDATE = "gpu update"  # of state that passes through the GPU, and norms, beside its compute
    H2D = "host to device"
    D2H = "device to host"
    STATE_IN = "state to device"  # of state that passes through the GPU: it would hold up, or wait
    STATE_OUT = "state to host"  # for, what else is copied
    CPU = "cpu"
    NVME_READ = "nvme read"
    NVME_WRITE = "nvme write"
    COMM = "data-parallel network"
    SEND = "pipeline send"
    RECV = "pipeline receive"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    FREE = "free"  # nothing runs here: it waits for users on several lanes


# Lanes that use another's link.
LINKS = {Lane.STATE_IN: Lane.H2D, Lane.STATE_OUT: Lane.D2H}


# Lanes that go no further ahead of forwards whose activations leave than the program has them.
# Copies of one link take turns: chunks of state that ran ten layers ahead kept those from leaving,
# and the forward waited for them, 0.28 s of a step of 4.85 (5.5B on 24 GiB, an H200).
PACED = (Lane.STATE_IN,)


def resource(lane: Lane) -> Lane:
    """What a lane keeps busy: itself, or the link that it shares with another."""
    return LINKS.get(lane, lane)


@dataclass(frozen=True, slots=True)
class Buffer:
    """`count` equal entries of `nbytes` each, allocated for the whole run."""

    name: str
    tier: Tier
    nbytes: int
    purpose: str  # what the user calls it: parameters, gradients, optimizer, activations, ...
    count: int = 1
    shares: tuple[Share, ...] = ()  # whose rows of it are used apart, see Ref
    within: str = ""  # the buffer where it begins in memory: only one of both holds anything
    home_of: Content | None = None  # what is at home here; of state, entries are its chunks

    @property
    def total(self) -> int:
        """Bytes of all entries."""
        return self.nbytes * self.count


class Ref(NamedTuple):
    """An entry of a buffer and what is in it. `moving`: both follow the micro-batch.

    `rows`: of a buffer with `shares` the rows of that share alone, which the others' do not touch.
    """

    buffer: str
    content: Content
    entry: int = 0
    moving: bool = False
    rows: Share | None = None


class Action(NamedTuple):  # as is Ref: a dataclass takes three times as long to make
    """One step of a rank. `amount`: bytes moved, or elements updated."""

    op: Op
    lane: Lane
    layer: int
    reads: tuple[Ref, ...] = ()
    writes: tuple[Ref, ...] = ()
    frees: tuple[Ref, ...] = ()
    amount: int = 0
    micro_batch: int = -1  # -1: the action belongs to no micro-batch
    recompute: Recompute = Recompute.NONE  # what BACKWARD runs again first
    share: Share | None = None  # the rows that an UPDATE, its moves or a CKPT are of
    beside_update: bool = False  # the CPU has layers to update while activations leave


@dataclass(frozen=True, slots=True)
class Repeat:
    """`body` `count` times; micro-batches advance by `stride` each time."""

    count: int
    stride: int
    body: tuple[Instruction, ...]


Instruction = Action | Repeat


@dataclass(frozen=True, slots=True)
class Program:
    """What a rank of one role executes: the first step, each later step, and the flush.

    With clipping, or in fp16, an update needs the norm of the whole gradient, so it runs in the
    next step just before its layer's forward: `first` has no updates, `flush` applies the last.

    `evaluate` is forward alone, of as many micro-batches as a step has, and changes nothing.
    `checkpoint` is `step` that also writes each layer's state after the layer's update; `save`
    writes the state as it is, once nothing is pending. Both are empty where nobody asks for them.
    """

    stage: int
    buffers: Mapping[str, Buffer]
    layers: Mapping[int, LayerPlacement]
    first: tuple[Instruction, ...]
    step: tuple[Instruction, ...]
    flush: tuple[Instruction, ...]
    evaluate: tuple[Instruction, ...] = ()
    checkpoint: tuple[Instruction, ...] = ()
    save: tuple[Instruction, ...] = ()

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Bytes a rank allocates on each tier."""
        every = self.buffers.values()
        return {tier: sum(self.added_bytes(b) for b in every if b.tier is tier) for tier in Tier}

    def added_bytes(self, buffer: Buffer) -> int:
        """Bytes that the buffer takes beside the one in whose memory it begins."""
        lent = self.buffers[buffer.within].total if buffer.within else 0
        return max(0, buffer.total - lent)


def walk(instructions: tuple[Instruction, ...], offset: int = 0) -> Iterator[tuple[Action, int]]:
    """The actions in order, repeats unrolled, each with its micro-batch within the step."""
    for instruction in instructions:
        if isinstance(instruction, Repeat):
            for i in range(instruction.count):
                yield from walk(instruction.body, offset + i * instruction.stride)
        else:
            number = instruction.micro_batch
            yield instruction, number + offset if number >= 0 else number


def expand(instructions: tuple[Instruction, ...], offset: int = 0) -> Iterator[Action]:
    """The actions in order, repeats unrolled, micro-batches numbered within the step."""
    for action, number in walk(instructions, offset):
        yield action if number == action.micro_batch else numbered(action, number)


def numbered(action: Action, number: int) -> Action:
    """The action for another micro-batch."""
    return action._replace(micro_batch=number)


def only(instructions: tuple[Instruction, ...], ops: Collection[Op]) -> tuple[Instruction, ...]:
    """The instructions without the actions of other ops."""
    kept: list[Instruction] = []
    for instruction in instructions:
        if isinstance(instruction, Repeat):
            body = only(instruction.body, ops)
            kept += [Repeat(instruction.count, instruction.stride, body)] if body else []
        elif instruction.op in ops:
            kept.append(instruction)
    return tuple(kept)


def counted(instructions: tuple[Instruction, ...], times: int = 1) -> Iterator[tuple[Action, int]]:
    """Every action once, with how often it runs."""
    for instruction in instructions:
        if isinstance(instruction, Repeat):
            yield from counted(instruction.body, times * instruction.count)
        else:
            yield instruction, times


def entry(ref: Ref, buffers: Mapping[str, Buffer], micro_batch: int) -> tuple[str, int]:
    """The concrete buffer entry that `ref` names for an action's micro-batch."""
    moved = ref.entry + micro_batch if ref.moving else ref.entry
    return ref.buffer, moved % buffers[ref.buffer].count


def held(ref: Ref, micro_batch: int) -> Held:
    """What the entry holds, with the micro-batch where it belongs to one."""
    return Held(ref.content, micro_batch if ref.moving else None)


# An entry of a buffer, or the rows of a share in it.
Place = tuple[str, int, Share | None]


def places(refs: Iterable[Ref], buffers: Mapping[str, Buffer], micro_batch: int) -> Iterator[Place]:
    """What refs use: actions that change the same place, or one that another reads, take turns."""
    for ref in refs:
        name, number = entry(ref, buffers, micro_batch)
        for share in (ref.rows,) if ref.rows else buffers[name].shares or (None,):
            yield name, number, share
        if buffers[name].within:
            yield buffers[name].within, 0, None


class Dependencies:
    """Order between the actions of one rank, derived from what they read and write.

    Feed the actions in program order: `add` returns the numbers of the earlier actions that must
    end before this one starts (beyond the order within its lane, which is not repeated here). Those
    of PACED lanes wait for the last forward before them whose activations leave, too.
    """

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        self._buffers = buffers
        self._writer: dict[Place, int] = {}
        self._readers: dict[Place, list[int]] = {}
        self._pace: int | None = None  # what the last to leave were computed by
        self._count = 0

    def add(self, action: Action) -> set[int]:
        """Register the next action; return the actions it waits for."""
        number, waits = self._count, set[int]()
        self._count += 1
        reads = list(places(action.reads, self._buffers, action.micro_batch))
        changed = action.writes + action.frees
        changes = list(places(changed, self._buffers, action.micro_batch))
        for key in reads:
            if key in self._writer:
                waits.add(self._writer[key])
        if action.lane in PACED and self._pace is not None:
            waits.add(self._pace)
        if action.op is Op.SAVE:
            self._pace = max(waits, default=None)
        for key in changes:
            if key in self._writer:
                waits.add(self._writer[key])
            waits.update(self._readers.get(key, ()))
        for key in reads:
            self._readers.setdefault(key, []).append(number)
        for key in changes:
            self._writer[key] = number
            self._readers[key] = []
        waits.discard(number)
        return waits


# Actions, each with the numbers of those that it waits for.
Order = tuple[tuple[Action, tuple[int, ...]], ...]


def order_of(buffers: Mapping[str, Buffer], actions: Iterable[Action]) -> Order:
    """What every action waits for beyond its own lane: of each other lane the last suffices."""
    dependencies, lanes = Dependencies(buffers), list[Lane]()
    found: list[tuple[Action, tuple[int, ...]]] = []
    for action in actions:
        last: dict[Lane, int] = {}
        for number in sorted(dependencies.add(action)):
            last[lanes[number]] = number
        last.pop(action.lane, None)
        lanes.append(action.lane)
        found.append((action, tuple(last.values())))
    return tuple(found)
