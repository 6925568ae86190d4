"""Rules that every program keeps, checked before it is simulated or run.

The checks know nothing of the solver or of how the program was made. They follow what every buffer
entry holds, action by action, through the first step, a steady one and the flush. Names say what
is in an entry (bigplan/lower/layout.py has the buffers'): w parameters, o optimizer state, g
gradients, p a unit's part of them, n a square sum; a number is the layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from bigplan.errors import VerificationError
from bigplan.graph.graph import Graph
from bigplan.placement import Tier
from bigplan.program import (
    Action,
    Instruction,
    Op,
    Program,
    Ref,
    Repeat,
    content,
    counted,
    entry,
    expand,
    only,
    walk,
)

Key = tuple[str, int]

WORK = Op.FORWARD, Op.BACKWARD

CHANGES = (
    Op.BACKWARD,
    Op.ACCUMULATE,
    Op.UPDATE,
)  # what they write is new, though it keeps its name


def verify(
    programs: Sequence[Program], graph: Graph, capacity: Mapping[Tier, int], ranks_per_node: int
) -> None:
    """Raise VerificationError at the first broken rule of any stage."""
    for program in programs:
        first, later = (only(part, WORK) for part in (program.first, program.step))
        _check_work(program, graph, first)
        if later != first:  # as a rule they differ in updates alone
            _check_work(program, graph, later)
        _check_updates(program, graph)
        _check_contents(program, graph)
    _check_messages(programs)
    _check_collectives(programs)
    _check_memory(programs, capacity, ranks_per_node)


def _fail(program: Program, action: Action, rule: str) -> VerificationError:
    return VerificationError(
        f"stage {program.stage}: {action.op} of layer {action.layer}, "
        f"micro-batch {action.micro_batch}: {rule}"
    )


def _check_contents(program: Program, graph: Graph) -> None:
    """Nothing is read before it is there, after it was freed, or after a change made it stale.

    Only homes outlast a part of the program, so that what holds for one steady step holds for all.
    """
    contents = _Contents(program, graph)
    for part, instructions in (
        ("first step", program.first),
        ("step", program.step),
        ("flush", program.flush),
    ):
        for instruction in instructions:
            if isinstance(instruction, Repeat):
                contents.repeat(instruction)
            else:
                contents.play(instruction)
        contents.close(part, pending=graph.clipped and part != "flush")


def _is(kinds: str, name: str) -> bool:
    """Whether a buffer or content is one of `kinds`, by its letter, of some layer."""
    return name[0] in kinds and name[1:2].isdigit()


class _Contents:
    """What every buffer entry of a rank holds; a copy that a change makes stale is gone."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self._program, self._graph = program, graph
        self._held: dict[Key, str] = {}
        self._copies: dict[str, set[Key]] = defaultdict(set)
        self._awaits: dict[str, Op] = {}  # contents that are not whole before this collective
        self._lasting: dict[Key, str] = {}
        for buffer in program.buffers.values():
            if _is("wo", buffer.name):
                for i in range(buffer.count):
                    chunk = buffer.name.removesuffix("nvme") + str(i)
                    name = chunk if buffer.name.endswith(".nvme") else buffer.name
                    self._lasting[buffer.name, i] = name
        for key, name in self._lasting.items():
            self._put(key, name)

    def play(self, action: Action) -> None:
        """Check what the action reads and frees, then hold what it writes."""
        number = action.micro_batch
        for ref in (*action.reads, *action.frees):
            self._expect(action, ref)
        read = {self._key(action, ref): content(ref, number) for ref in action.reads}
        for name in read.values():
            self._check_whole(action, name)
        for ref in action.writes:
            self._write(action, ref, read)
        self._collect(action)
        consumed = action.reads if action.op is Op.CLIP else action.frees
        for ref in consumed:
            self._drop(entry(ref, self._program.buffers, number))

    def repeat(self, block: Repeat) -> None:
        """Play a block until it leaves what it found, of later micro-batches; then skip the rest.

        To look at all that is held takes as long as an eighth as many actions: short blocks are
        only played.
        """
        found: object = None
        short = 8 * sum(times for _, times in counted(block.body)) < len(self._held)
        for i in range(block.count):
            for action in expand(block.body, i * block.stride):
                self.play(action)
            if short:
                continue
            left = self._relative((i + 1) * block.stride)
            if left == found:
                self._move((block.count - 1 - i) * block.stride)
                return
            found = left

    def _relative(self, number: int) -> object:
        """What is held, seen from micro-batch `number`."""
        held = {self._later(key, name, -number) for key, name in self._held.items()}
        return held, dict(self._awaits)

    def _move(self, by: int) -> None:
        held, self._held, self._copies = self._held, {}, defaultdict(set)
        for key, name in held.items():
            self._put(*self._later(key, name, by))

    def _later(self, key: Key, name: str, by: int) -> tuple[Key, str]:
        """The same content so many micro-batches later: both the name and the entry move on."""
        if not name.endswith("]"):
            return key, name
        start, number = name[:-1].split("[")
        (buffer, place), count = key, self._program.buffers[key[0]].count
        return (buffer, (place + by) % count), f"{start}[{int(number) + by}]"

    def close(self, part: str, *, pending: bool) -> None:
        """End a part: parameters and state are home, gradients only where updates are `pending`."""
        for key, name in self._lasting.items():
            if self._held.get(key) != name:
                raise self._unfinished(part, f"{key[0]}[{key[1]}] lacks the newest {name}")
        for name, op in self._awaits.items():
            raise self._unfinished(part, f"{name} still waits for {op}")
        for key, name in list(self._held.items()):
            if _is("p", name) or (_is("g", name) and _is("g", key[0]) and not pending):
                raise self._unfinished(part, f"gradients {name} were never used")
            if not _is("wog", key[0]) and name != "clip":
                self._drop(key)

    def _unfinished(self, part: str, rule: str) -> VerificationError:
        return VerificationError(f"stage {self._program.stage}: after the {part}, {rule}")

    def _expect(self, action: Action, ref: Ref) -> None:
        key, expected = self._key(action, ref), content(ref, action.micro_batch)
        found = self._held.get(key)
        if found != expected:
            where = f"{key[0]}[{key[1]}]"
            rule = f"{where} holds {found or 'nothing'}, not {expected}"
            raise _fail(self._program, action, rule)

    def _key(self, action: Action, ref: Ref) -> Key:
        if ref.buffer not in self._program.buffers:
            raise _fail(self._program, action, f"buffer {ref.buffer!r} does not exist")
        return entry(ref, self._program.buffers, action.micro_batch)

    def _check_whole(self, action: Action, name: str) -> None:
        missing = self._awaits.get(name)
        if missing is Op.REDUCE and action.op not in (Op.BACKWARD, Op.REDUCE):
            raise _fail(self._program, action, f"gradients {name} are not reduced yet")
        if missing is Op.GATHER and action.op in (Op.FORWARD, Op.BACKWARD):
            raise _fail(self._program, action, f"parameters {name} are not gathered yet")

    def _write(self, action: Action, ref: Ref, read: Mapping[Key, str]) -> None:
        key, name = self._key(action, ref), content(ref, action.micro_batch)
        gone = {key}
        if action.op in CHANGES or name not in read.values():
            gone |= self._copies[name]
        for stale in gone - set(read):
            lost = self._held.get(stale, "-")
            sums = action.op is Op.BACKWARD and _is("g", stale[0])
            if _is("p", lost) or (sums and _is("g", lost)):
                raise _fail(self._program, action, f"overwrites gradients {lost}, never used")
        for stale in gone:
            self._drop(stale)
        self._put(key, name)

    def _collect(self, action: Action) -> None:
        """Note which contents a collective must still make whole, or just made so."""
        strategy = self._graph.strategy
        if action.op is Op.BACKWARD and strategy.dp > 1:
            sums = (ref.content for ref in action.writes if _is("pg", ref.content))
            self._awaits.update(dict.fromkeys(sums, Op.REDUCE))
        elif action.op is Op.UPDATE and strategy.zero:
            kind = self._graph.kinds[self._graph.layers[action.layer]]
            if strategy.zero < 3 or kind.pinned:  # state is split, parameters are not
                self._awaits[f"w{action.layer}"] = Op.GATHER
        elif action.op in (Op.REDUCE, Op.GATHER):
            for ref in action.writes:
                awaited = self._awaits.pop(ref.content, None)
                if action.op is Op.REDUCE and awaited is not Op.REDUCE:
                    raise _fail(self._program, action, f"{ref.content} is reduced twice")

    def _put(self, key: Key, name: str) -> None:
        self._drop(key)
        self._held[key] = name
        self._copies[name].add(key)

    def _drop(self, key: Key) -> None:
        name = self._held.pop(key, None)
        if name is not None:
            self._copies[name].discard(key)


def _check_work(program: Program, graph: Graph, instructions: tuple[Instruction, ...]) -> None:
    """Every layer runs forward and backward once on every micro-batch, forward first."""
    forward: set[tuple[int, int]] = set()  # layer and micro-batch
    backward: set[tuple[int, int]] = set()
    repeated = []
    for action, number in walk(instructions):
        work, done = (action.layer, number), forward if action.op is Op.FORWARD else backward
        if done is backward and work not in forward:
            raise _fail(program, action, "runs before its forward")
        if work in done:
            repeated.append(str((action.op, *work)))
        done.add(work)
    expected = set(product(program.layers, range(graph.micro_batches)))
    wrong = sorted(
        str((op, *work))
        for op, done in zip(WORK, (forward, backward), strict=True)
        for work in expected ^ done
    )
    wrong += sorted(repeated)
    if wrong:
        raise VerificationError(
            f"stage {program.stage}: missing, repeated or foreign work: {', '.join(wrong[:3])}"
        )


def _check_updates(program: Program, graph: Graph) -> None:
    """Every row of every layer is updated once: in each step, or, deferred, in the flush."""
    for part, instructions in (("first step", program.first), ("step", program.step)):
        clips = sum(times for _, times in counted(only(instructions, (Op.CLIP,))))
        if clips != int(graph.clipped):
            raise VerificationError(
                f"stage {program.stage}: the {part} computes {clips} clip factors, not "
                f"{int(graph.clipped)}"
            )
    deferred = ("flush", program.flush) if graph.clipped else ("first step", program.first)
    if graph.clipped and _updates(program.first):
        raise VerificationError(
            f"stage {program.stage}: the first step updates before any norm is known"
        )
    for part, instructions in (("step", program.step), deferred):
        _check_rows(program, graph, part, _updates(instructions))


def _updates(instructions: tuple[Instruction, ...]) -> list[Action]:
    return list(expand(only(instructions, (Op.UPDATE,))))


def _check_rows(program: Program, graph: Graph, part: str, updates: list[Action]) -> None:
    """Every piece and chunk of optimizer state is used once, and all rows have one."""
    states = Counter(ref.content for a in updates for ref in a.writes if _is("o", ref.content))
    rows = Counter[int]()
    for action in updates:
        rows[action.layer] += action.amount
    for layer in program.layers:
        buffers = [b for b in program.buffers.values() if b.name.startswith(f"o{layer}.")]
        pieces = sum(buffer.count for buffer in buffers)
        mine = {name: n for name, n in states.items() if name.startswith(f"o{layer}.")}
        whole = graph.kinds[graph.layers[layer]].parameters
        owned = -(-whole // graph.strategy.dp) if graph.strategy.zero else whole
        once = len(mine) == pieces and all(n == 1 for n in mine.values())
        # A shard, and each chunk, rounds up to whole elements.
        if not once or not owned <= rows[layer] <= owned + pieces:
            raise VerificationError(
                f"stage {program.stage}: in the {part}, layer {layer} updates {rows[layer]} of its "
                f"{owned} elements, in {sum(mine.values())} of {pieces} pieces"
            )


def _check_messages(programs: Sequence[Program]) -> None:
    """Neighbours send exactly what the other receives, in the same order.

    With virtual stages the last stage's neighbour is the first.
    """
    for upstream, downstream in zip(programs, (*programs[1:], programs[0]), strict=True):
        for label, sender, receiver in (("h", upstream, downstream), ("d", downstream, upstream)):
            for part in ("first", "step"):
                sent = list(_messages(getattr(sender, part), Op.SEND, label))
                received = list(_messages(getattr(receiver, part), Op.RECV, label))
                if sent != received:
                    raise VerificationError(
                        f"stage {sender.stage} sends {len(sent)} {label!r} messages to stage "
                        f"{receiver.stage}, which receives {len(received)}, or in another order"
                    )


def _messages(instructions: tuple[Instruction, ...], op: Op, label: str) -> Iterable[str]:
    for action, number in walk(only(instructions, (op,))):
        refs = action.reads if op is Op.SEND else action.writes
        if refs[0].content.startswith(label):
            yield content(refs[0], number)


def _check_collectives(programs: Sequence[Program]) -> None:
    """Collectives of a communicator are on one lane, so every rank issues them in one order.

    All ranks of a stage run the same program; what can break the order is a collective that
    was put on another lane, where nothing orders it against the others.
    """
    for program in programs:
        for instructions in (program.first, program.step, program.flush):
            lanes = {a.lane for a, _ in counted(only(instructions, (Op.REDUCE, Op.GATHER)))}
            if len(lanes) > 1:
                names = ", ".join(sorted(lanes))
                raise VerificationError(
                    f"stage {program.stage}: collectives of one communicator on lanes {names}"
                )


def node_bytes(programs: Sequence[Program], tier: Tier, ranks_per_node: int) -> int:
    """Bytes of the fullest node: its ranks belong to neighbouring stages, or all to one."""
    each = [program.bytes_by_tier()[tier] for program in programs]
    return max(each) * ranks_per_node


def _check_memory(
    programs: Sequence[Program], capacity: Mapping[Tier, int], ranks_per_node: int
) -> None:
    """Allocations of every tier fit its capacity."""
    for program in programs:
        used = program.bytes_by_tier()[Tier.GPU]
        if used > capacity[Tier.GPU]:
            raise VerificationError(
                f"stage {program.stage}: {used} bytes on a GPU of {capacity[Tier.GPU]}"
            )
    for tier in (Tier.HOST, Tier.NVME):
        used = node_bytes(programs, tier, ranks_per_node)
        if used > capacity[tier]:
            raise VerificationError(f"{used} bytes on {tier} of {capacity[tier]} per node")
