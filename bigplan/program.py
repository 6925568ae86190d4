"""The program: what one rank of a role does in one optimizer step, as a static list of actions.

The simulator prices the list, the verifier checks it and the runtime executes it. Actions name the
buffers that they read, write and free. Their order follows from these names (bigplan/order.py): an
action may start when its lane is free, what it reads has been written, and what it overwrites is no
longer read. Repeat blocks stand for micro-batches, so a thousand micro-batches are not a thousand
copies of their actions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from bigplan.content import Content, HeldContent
from bigplan.graph.graph import Recompute
from bigplan.layer_placement import LayerPlacement
from bigplan.placement import Share, Tier


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
    TENSOR_REDUCE = "tensor_reduce"  # gradients of parameters that several tensor ranks hold
    REDUCE = "reduce"  # all-reduce or reduce-scatter of a layer's gradients
    SUM_REPLICAS = "sum_replicas"  # all-reduce of a rank's part of them over zero groups
    GRAD_OUT = "grad_out"  # GPU to host: gradients
    PARAM_OUT = "param_out"  # GPU to host: parameters that a CPU update changes in place
    ACCUMULATE = "accumulate"  # add a unit's gradients to their sum in host memory
    NORM = "norm"  # square sum of a layer's final gradients
    CLIP = "clip"  # the clip factor from all square sums
    STATE_IN = "state_in"  # host to GPU: a chunk of optimizer state with its gradients
    UPDATE = "update"  # the optimizer on one share of a layer, or a chunk of it
    STATE_OUT = "state_out"  # GPU to host: the updated chunk, with its new parameters
    WRITE = "write"  # host to NVMe
    SEND = "send"
    RECV = "recv"
    FREE = "free"
    CKPT = "ckpt"  # write a piece of a layer's state to the checkpoint


DOCUMENTS = "documents"  # the buffer that says where they are: no action reads or writes it
# Names of the rings of rows that are looked up in tables in host memory.
ROWS, STAGED_ROWS = "rows", "stage.r"


class Lane(StrEnum):
    """A queue whose actions run one after the other, in program order."""

    COMPUTE = "gpu compute"
    GPU_UPDATE = "gpu update"  # norms, and updates of streamed state, beside the GPU's compute
    H2D = "host to device"
    D2H = "device to host"
    # Streamed state has lanes of its own: in H2D and D2H it would wait for other copies, or they
    # would wait for it.
    STATE_IN = "state to device"
    STATE_OUT = "state to host"
    CPU = "cpu"
    NVME_READ = "nvme read"
    NVME_WRITE = "nvme write"
    COMM = "data-parallel network"
    SEND = "pipeline send"
    RECV = "pipeline receive"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    FREE = "free"  # runs nothing: a FREE only waits for users on several lanes


# Lanes that use the link of another lane.
LINKS = {Lane.STATE_IN: Lane.H2D, Lane.STATE_OUT: Lane.D2H}


def resource(lane: Lane) -> Lane:
    """The resource that a lane keeps busy: the lane itself, or the lane whose link it shares."""
    return LINKS.get(lane, lane)


@dataclass(frozen=True, slots=True)
class Buffer:
    """`count` equal entries of `nbytes` each, allocated for the whole run."""

    name: str
    tier: Tier
    nbytes: int
    purpose: str  # what the user calls it: parameters, gradients, optimizer, activations, ...
    count: int = 1
    shares: tuple[Share, ...] = ()  # shares whose rows are used independently, see Ref
    within: str = ""  # the buffer in whose memory this one begins; only one of both is in use
    home_of: Content | None = None  # what lives here for the whole run; chunks of state are entries
    whole: bool = False  # an entry holds the parts of all ranks of a layer, not only one rank's
    dynamic: bool = False  # entries are tensors that compute makes, in its allocator's memory
    live: int | None = None  # a dynamic buffer's entries in use when its rank uses the most memory

    @property
    def total(self) -> int:
        """Bytes of all entries, or of those that count where a rank uses the most memory."""
        return self.nbytes * (self.count if self.live is None else self.live)


class Ref(NamedTuple):
    """An entry of a buffer and its content. `moving`: the micro-batch selects entry and content.

    `rows`: in a buffer with `shares`, only the rows of this share; None: the rows of all shares.
    """

    buffer: str
    content: Content
    entry: int = 0
    moving: bool = False
    rows: Share | None = None


class Action(NamedTuple):  # like Ref no dataclass, which would take three times as long to make
    """One step of a rank. `amount`: bytes moved, or elements updated."""

    op: Op
    lane: Lane
    layer: int
    reads: tuple[Ref, ...] = ()
    writes: tuple[Ref, ...] = ()
    frees: tuple[Ref, ...] = ()
    amount: int = 0
    micro_batch: int = -1  # -1: the action belongs to no micro-batch
    recompute: Recompute = Recompute.NONE  # what BACKWARD first runs again
    share: Share | None = None  # whose rows an UPDATE, its moves or a CKPT handle
    beside_update: bool = False  # the CPU updates layers while these activations leave


@dataclass(frozen=True, slots=True)
class Repeat:
    """Runs `body` `count` times; each time, micro-batch numbers grow by `stride`."""

    count: int
    stride: int
    body: tuple[Instruction, ...]


Instruction = Action | Repeat


@dataclass(frozen=True, slots=True)
class Program:
    """What a rank of one role executes: the first step, each later step, and the flush.

    With clipping, or in fp16, an update needs the norm of the whole gradient. So a layer's update
    runs in the next step, just before the layer's forward. Then `first` has no updates, and `flush`
    applies the last ones.

    `evaluate` runs forwards only, for as many micro-batches as a step has, and changes no state.
    `checkpoint` is a `step` that also writes each layer's state after the layer's update. `save`
    writes the state while no update is pending. Both are empty where nobody asks for them.
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
    captured: bool = False  # the GPU repeats blocks' passes and updates from CUDA graphs
    _homes: Mapping[Content, Buffer] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        homes = {buffer.home_of: buffer for buffer in self.buffers.values() if buffer.home_of}
        object.__setattr__(self, "_homes", homes)

    def home(self, content: Content) -> Buffer | None:
        """The buffer where the content lives for the whole run, if any.

        All chunks of a share of state live in one buffer, one chunk per entry.
        """
        return self._homes.get(content._replace(chunk=0))

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Bytes a rank allocates on each tier."""
        every = self.buffers.values()
        return {tier: sum(self.added_bytes(b) for b in every if b.tier is tier) for tier in Tier}

    def added_bytes(self, buffer: Buffer) -> int:
        """Bytes that the buffer needs beyond the memory of the buffer in which it begins."""
        lent = self.buffers[buffer.within].total if buffer.within else 0
        return max(0, buffer.total - lent)


def walk(instructions: tuple[Instruction, ...], offset: int = 0) -> Iterator[tuple[Action, int]]:
    """The actions in order, repeats unrolled, each with its micro-batch number in the step."""
    for instruction in instructions:
        if isinstance(instruction, Repeat):
            for i in range(instruction.count):
                yield from walk(instruction.body, offset + i * instruction.stride)
        else:
            number = instruction.micro_batch
            yield instruction, number + offset if number >= 0 else number


def expand(instructions: tuple[Instruction, ...], offset: int = 0) -> Iterator[Action]:
    """The actions in order, repeats unrolled, with micro-batch numbers of the step."""
    for action, number in walk(instructions, offset):
        yield numbered(action, number)


def numbered(action: Action, number: int) -> Action:
    """The action for another micro-batch."""
    return action if number == action.micro_batch else action._replace(micro_batch=number)


def only(instructions: tuple[Instruction, ...], ops: Collection[Op]) -> tuple[Instruction, ...]:
    """The instructions with only the actions of `ops`; empty repeats are left out."""
    kept: list[Instruction] = []
    for instruction in instructions:
        if isinstance(instruction, Repeat):
            body = only(instruction.body, ops)
            kept += [Repeat(instruction.count, instruction.stride, body)] if body else []
        elif instruction.op in ops:
            kept.append(instruction)
    return tuple(kept)


def counted(instructions: tuple[Instruction, ...], times: int = 1) -> Iterator[tuple[Action, int]]:
    """Every action once, with the number of times that it runs."""
    for instruction in instructions:
        if isinstance(instruction, Repeat):
            yield from counted(instruction.body, times * instruction.count)
        else:
            yield instruction, times


def entry(ref: Ref, buffers: Mapping[str, Buffer], micro_batch: int) -> tuple[str, int]:
    """The buffer and the number of the entry that `ref` means for an action's micro-batch."""
    moved = ref.entry + micro_batch if ref.moving else ref.entry
    return ref.buffer, moved % buffers[ref.buffer].count


def held(ref: Ref, micro_batch: int) -> HeldContent:
    """The content that `ref` means, with the micro-batch where the micro-batch selects it."""
    return HeldContent(ref.content, micro_batch if ref.moving else None)
