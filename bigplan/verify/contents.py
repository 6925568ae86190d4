"""What every buffer entry of a rank holds, followed action by action."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Set

from bigplan.content import ADAPTERS, Content, HeldContent, Holds
from bigplan.errors import VerificationError
from bigplan.graph.graph import Graph
from bigplan.program import Action, Buffer, Op, Program, Ref, Repeat, counted, entry, expand, held

Key = tuple[str, int]

CHANGES = (
    Op.BACKWARD,
    Op.ACCUMULATE,
    Op.UPDATE,
    Op.STATE_OUT,
)  # what these write is new, though it has the same name

LASTING = {Holds.PARAMETERS, Holds.STATE}  # their homes hold them from one step to the next
# Ops that make gradients whole, in this order: over ranks that have the same samples, with those of
# another stage for a shared table, over ranks that have other samples, over their zero groups.
REDUCTIONS = (Op.TENSOR_REDUCE, Op.ACCUMULATE, Op.REDUCE, Op.SUM_REPLICAS)
PARTS = {Holds.PARTIAL_GRADIENTS, Holds.ROW_GRADIENTS}  # parts that have to be added to a sum


def fail(program: Program, action: Action, rule: str) -> VerificationError:
    """The error that says which rule an action breaks."""
    return VerificationError(
        f"stage {program.stage}: {action.op} of layer {action.layer}, "
        f"micro-batch {action.micro_batch}: {rule}"
    )


def check_contents(program: Program, graph: Graph) -> None:
    """Nothing is read before it is there, after it was freed, or after a change made it stale.

    Only homes outlast a part of the program. So what holds for one steady step holds for all.
    """
    contents = _Contents(program, graph)
    for part, instructions in (
        ("first step", program.first),
        ("step", program.step),
        ("flush", program.flush),
        ("evaluation", program.evaluate),
    ):
        for instruction in instructions:
            if isinstance(instruction, Repeat):
                contents.repeat(instruction)
            else:
                contents.play(instruction)
        contents.close(part, pending=graph.deferred and part in ("first step", "step"))


def is_home(buffer: Buffer, kinds: Set[Holds]) -> bool:
    """Whether content of one of `kinds` is at home in the buffer."""
    return buffer.home_of is not None and buffer.home_of.kind in kinds


class _Contents:
    """What every buffer entry of a rank holds; copies that a change makes stale are dropped."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self._program, self._graph = program, graph
        self._held: dict[str, dict[int, HeldContent]] = defaultdict(dict)  # by buffer, then entry
        self._copies: dict[HeldContent, set[Key]] = defaultdict(set)
        self._awaits: dict[Content, Op] = {}  # contents that are not whole before this op
        self._lent = set[Content]()  # contents of which another stage has a copy
        self._beside: dict[str, list[str]] = defaultdict(list)  # buffers that share memory
        self._lasting: dict[Key, HeldContent] = {}
        self._sums = set[str]()  # homes of gradients
        for buffer in program.buffers.values():
            if buffer.within:
                self._beside[buffer.name].append(buffer.within)
                self._beside[buffer.within].append(buffer.name)
            if buffer.home_of and is_home(buffer, LASTING):
                for i in range(buffer.count):
                    self._lasting[buffer.name, i] = HeldContent(buffer.home_of._replace(chunk=i))
            elif is_home(buffer, {Holds.GRADIENTS}):
                self._sums.add(buffer.name)
        for key, found in self._lasting.items():
            self._put(key, found)

    def play(self, action: Action) -> None:
        """Check what the action reads and frees, then hold what it writes."""
        read = dict(self._expect(action, ref) for ref in action.reads)
        freed = [self._expect(action, ref)[0] for ref in action.frees]
        for found in read.values():
            self._check_whole(action, found)
        for ref in action.writes:
            self._write(action, ref, read)
        self._collect(action)
        for key in read if action.op is Op.CLIP else freed:
            self._drop(key)

    def repeat(self, block: Repeat) -> None:
        """Play a block until it leaves what it found, for later micro-batches; skip the rest.

        The comparison of all that a block may use takes as long as an eighth as many actions. So
        short blocks are just played.
        """
        found: object = None
        body = list(counted(block.body))
        used = {ref.buffer for a, _ in body for ref in (*a.reads, *a.writes, *a.frees)}
        short = 8 * sum(times for _, times in body) < sum(len(self._held[name]) for name in used)
        for i in range(block.count):
            for action in expand(block.body, i * block.stride):
                self.play(action)
            if short:
                continue
            left = self._relative(used, (i + 1) * block.stride)
            if left == found:
                self._move(used, (block.count - 1 - i) * block.stride)
                return
            found = left

    def _in(self, buffers: Collection[str]) -> list[tuple[Key, HeldContent]]:
        """What the buffers hold."""
        return [((b, i), found) for b in buffers for i, found in self._held[b].items()]

    def _relative(self, buffers: Collection[str], number: int) -> object:
        """What the buffers hold, seen from micro-batch `number`."""
        seen = {self._later(key, found, -number) for key, found in self._in(buffers)}
        return seen, dict(self._awaits)

    def _move(self, buffers: Collection[str], by: int) -> None:
        moved = [self._later(key, found, by) for key, found in self._in(buffers)]
        for key, _ in self._in(buffers):
            self._drop(key)
        for key, found in moved:
            self._put(key, found)

    def _later(self, key: Key, found: HeldContent, by: int) -> tuple[Key, HeldContent]:
        """The entry `by` micro-batches later: a micro-batch's content moves on with it."""
        if found.micro_batch is None:
            return key, found
        (buffer, place), count = key, self._program.buffers[key[0]].count
        return (buffer, (place + by) % count), HeldContent(found.content, found.micro_batch + by)

    def close(self, part: str, *, pending: bool) -> None:
        """End a part: homes hold parameters and state; gradients only if updates are pending."""
        for key, newest in self._lasting.items():
            if self._at(key) != newest:
                raise self._unfinished(part, f"{key[0]}[{key[1]}] lacks the newest {newest}")
        for content, op in self._awaits.items():
            raise self._unfinished(part, f"{content} still wait for {op}")
        for key, found in self._in(list(self._held)):
            kind, is_sum = found.content.kind, key[0] in self._sums
            if kind in PARTS or (kind is Holds.GRADIENTS and is_sum and not pending):
                raise self._unfinished(part, f"{found} were never used")
            if not is_sum and key not in self._lasting and kind is not Holds.CLIP:
                self._drop(key)
        self._lent.clear()

    def _unfinished(self, part: str, rule: str) -> VerificationError:
        return VerificationError(f"stage {self._program.stage}: after the {part}, {rule}")

    def _expect(self, action: Action, ref: Ref) -> tuple[Key, HeldContent]:
        """The entry that the action refers to, with its content, which must be the expected one."""
        key, expected = self._key(action, ref), held(ref, action.micro_batch)
        found = self._at(key)
        if found != expected:
            where = f"{key[0]}[{key[1]}]"
            rule = f"{where} holds {found or 'nothing'}, not {expected}"
            raise fail(self._program, action, rule)
        return key, expected

    def _key(self, action: Action, ref: Ref) -> Key:
        if ref.buffer not in self._program.buffers:
            raise fail(self._program, action, f"buffer {ref.buffer!r} does not exist")
        own = (action.share.updater,) if action.share else ()
        if ref.rows and ref.rows not in {*own} & {*self._program.buffers[ref.buffer].shares}:
            raise fail(self._program, action, f"rows of {ref.rows} in {ref.buffer} are not its own")
        return entry(ref, self._program.buffers, action.micro_batch)

    def _check_whole(self, action: Action, found: HeldContent) -> None:
        missing = self._awaits.get(found.content)
        if missing in REDUCTIONS:
            rest = self._reductions(found.content)
            added = missing is Op.SUM_REPLICAS and action.op is Op.ACCUMULATE  # summed later
            if not added and action.op not in (Op.BACKWARD, *rest[: rest.index(missing) + 1]):
                raise fail(self._program, action, f"{found} are not reduced yet")
        if missing is Op.GATHER and action.op in (Op.FORWARD, Op.BACKWARD, Op.SEND):
            raise fail(self._program, action, f"{found} are not gathered yet")

    def _write(self, action: Action, ref: Ref, read: Mapping[Key, HeldContent]) -> None:
        key, written = self._key(action, ref), held(ref, action.micro_batch)
        if written.content in self._lent:
            raise fail(self._program, action, f"changes {written}, which another stage reads")
        gone = {key}
        if action.op in CHANGES or written not in read.values():
            gone |= self._copies[written]
        for stale in gone - set(read):
            if self._loses(action, stale):
                lost = self._at(stale)
                raise fail(self._program, action, f"overwrites {lost}, never used")
        for stale in gone:
            self._drop(stale)
        for _, other in self._in(self._beside.get(key[0], ())):
            rule = f"{written} overwrite {other}, whose place they share"
            raise fail(self._program, action, rule)
        self._put(key, written)

    def _loses(self, action: Action, stale: Key) -> bool:
        """Whether the overwritten entry has gradients that no action has used."""
        lost = self._at(stale)
        if lost is None:
            return False
        starts = action.op is Op.BACKWARD and stale[0] in self._sums
        return lost.content.kind in PARTS or (starts and lost.content.kind is Holds.GRADIENTS)

    def _collect(self, action: Action) -> None:
        """Note which contents a collective must still make whole, or has just made whole."""
        strategy = self._graph.strategy
        if action.op is Op.BACKWARD:
            gradients = {Holds.GRADIENTS, *PARTS}
            for ref in action.writes:
                if ref.content.kind in gradients and (awaited := self._reductions(ref.content)):
                    self._awaits[ref.content] = awaited[0]
        elif action.op is Op.UPDATE and strategy.zero and action.layer != ADAPTERS:
            kind = self._graph.kinds[self._graph.layers[action.layer]]
            if strategy.zero < 3 or kind.pinned:  # state is split, parameters are not
                self._awaits[Content(Holds.PARAMETERS, action.layer)] = Op.GATHER
        elif action.op is Op.GATHER:
            for ref in action.writes:
                self._awaits.pop(ref.content, None)
        elif action.op in REDUCTIONS:
            for ref in action.writes:
                self._reduce(action, ref.content)
        elif action.op is Op.SEND:
            self._lent |= {ref.content for ref in action.reads if ref.content.kind in LASTING}

    def _reduce(self, action: Action, gradients: Content) -> None:
        rest = self._reductions(gradients)
        if action.op is Op.ACCUMULATE:
            if action.op not in rest:
                self._add(action, gradients)
                return
            self._lent.discard(Content(Holds.PARAMETERS, gradients.layer))
        if self._awaits.pop(gradients, None) is not action.op:
            raise fail(self._program, action, f"{gradients} are reduced twice")
        for later in rest[rest.index(action.op) + 1 :][:1]:
            self._awaits[gradients] = later

    def _add(self, action: Action, gradients: Content) -> None:
        """Add a unit's gradients, reduced before, though maybe not over zero groups."""
        parts = {ref.content for ref in action.reads}
        awaited = {self._awaits.get(part) for part in parts}
        if len(awaited) > 1:
            rule = f"adds {gradients} of this zero group to those of all groups"
            raise fail(self._program, action, rule)
        for part in parts:
            self._awaits.pop(part, None)
        if (missing := awaited.pop()) is not None:
            self._awaits[gradients] = missing

    def _reductions(self, gradients: Content) -> tuple[Op, ...]:
        """The ops that make gradients whole after their backward, in order."""
        graph, layer = self._graph, gradients.layer
        if layer == ADAPTERS:
            repeated = bool(graph.adapters(self._program.layers).repeated)
        elif layer not in self._program.layers:  # a table of another stage, which reduces it
            return ()
        else:
            repeated = bool(graph.kinds[graph.layers[layer]].repeated)
        lent = graph.lends_table and layer == 0
        several = graph.strategy.shards > 1, graph.strategy.zero_group > 0 and layer != ADAPTERS
        needed = (repeated, lent, *several)
        return tuple(op for op, wanted in zip(REDUCTIONS, needed, strict=True) if wanted)

    def _at(self, key: Key) -> HeldContent | None:
        return self._held[key[0]].get(key[1])

    def _put(self, key: Key, found: HeldContent) -> None:
        self._drop(key)
        self._held[key[0]][key[1]] = found
        self._copies[found].add(key)

    def _drop(self, key: Key) -> None:
        found = self._held[key[0]].pop(key[1], None)
        if found is not None:
            self._copies[found].discard(key)
