"""The rules, one function each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bigplan.content import ADAPTERS, Content, HeldContent, Holds
from bigplan.errors import VerificationError
from bigplan.graph.graph import Graph
from bigplan.placement import Tier
from bigplan.program import (
    Action,
    Instruction,
    Op,
    Program,
    counted,
    expand,
    held,
    only,
    walk,
)
from bigplan.spec.sharing import NodeSharing
from bigplan.verify.checkpoints import check_checkpoints
from bigplan.verify.contents import check_contents, fail, is_home

WORK = Op.FORWARD, Op.BACKWARD


def verify(
    programs: Sequence[Program], graph: Graph, capacity: Mapping[Tier, int], sharing: NodeSharing
) -> None:
    """Raise VerificationError at the first broken rule of any stage."""
    for program in programs:
        first, later = (only(part, WORK) for part in (program.first, program.step))
        _check_work(program, graph, first)
        if later != first:  # usually only the updates differ
            _check_work(program, graph, later)
        _check_updates(program, graph)
        check_contents(program, graph)
    _check_messages(programs, graph)
    _check_collectives(programs)
    for program in programs:
        _check_batches(program, graph)
        check_checkpoints(program, graph)
    _check_memory(programs, capacity, sharing)


def _check_work(program: Program, graph: Graph, instructions: tuple[Instruction, ...]) -> None:
    """Every layer runs forward and backward once on every micro-batch, forward first."""
    done = _marks(program, graph, WORK)
    foreign, repeated = [], []
    for action, number in walk(instructions):
        marks = done[action.op].get(action.layer)
        if marks is None or not 0 <= number < len(marks):
            foreign.append(str((action.op, action.layer, number)))
            continue
        if action.op is Op.BACKWARD and not done[Op.FORWARD][action.layer][number]:
            raise fail(program, action, "runs before its forward")
        if marks[number]:
            repeated.append(str((action.op, action.layer, number)))
        marks[number] = 1
    wrong = sorted([*foreign, *_missing(done)]) + sorted(repeated)
    if wrong:
        raise VerificationError(
            f"stage {program.stage}: missing, repeated or foreign work: {', '.join(wrong[:3])}"
        )


def _marks(program: Program, graph: Graph, ops: Iterable[Op]) -> dict[Op, dict[int, bytearray]]:
    """A byte for each op, layer and micro-batch: tens of thousands are set in a few ms."""
    return {op: {layer: bytearray(graph.micro_batches) for layer in program.layers} for op in ops}


def _missing(done: Mapping[Op, Mapping[int, bytearray]]) -> Iterator[str]:
    for op, layers in done.items():
        for layer, marks in layers.items():
            if 0 in marks:
                yield from (str((op, layer, n)) for n, mark in enumerate(marks) if not mark)


def _check_batches(program: Program, graph: Graph) -> None:
    """Every batch comes once, in order, and the layers that need tokens or targets read them.

    An evaluation passes every layer forward, once on every micro-batch.
    """
    loss, numbers = len(graph.layers) - 1, range(graph.micro_batches)
    asked = list(numbers) if {0, loss} & set(program.layers) else []
    evaluated = program.evaluate
    for part in (program.first, program.step, evaluated):
        came = [number for _, number in walk(only(part, (Op.DATA,)))]
        if part and came != asked:
            raise VerificationError(
                f"stage {program.stage}: {len(came)} batches in this order: {came[:3]}..., not "
                f"{len(asked)} from 0 on"
            )
        for action, _ in counted(only(part, WORK)):
            trains = action.op is Op.BACKWARD or part is evaluated
            needs = action.layer == loss if trains else False
            needs = needs or (action.layer == 0 and action.op is Op.FORWARD)
            if needs and all(ref.content.kind is not Holds.BATCH for ref in action.reads):
                raise fail(program, action, "does not read its batch")
    if evaluated and not _passes_forward(program, graph, only(evaluated, WORK)):
        raise VerificationError(
            f"stage {program.stage}: the evaluation does not pass every layer once, forward, on "
            "every micro-batch"
        )


def _passes_forward(program: Program, graph: Graph, instructions: tuple[Instruction, ...]) -> bool:
    """Whether every layer runs forward once on every micro-batch, and nothing else runs."""
    done = _marks(program, graph, (Op.FORWARD,))
    for action, number in walk(instructions):
        marks = done.get(action.op, {}).get(action.layer)
        if marks is None or not 0 <= number < len(marks) or marks[number]:
            return False
        marks[number] = 1
    return not any(_missing(done))


def _check_updates(program: Program, graph: Graph) -> None:
    """Every row of every layer is updated once: in each step, or, deferred, in the flush."""
    for part, instructions in (("first step", program.first), ("step", program.step)):
        clips = sum(times for _, times in counted(only(instructions, (Op.CLIP,))))
        if clips != int(graph.deferred):
            raise VerificationError(
                f"stage {program.stage}: the {part} computes {clips} clip factors, not "
                f"{int(graph.deferred)}"
            )
    deferred = ("flush", program.flush) if graph.deferred else ("first step", program.first)
    if graph.deferred and _updates(program.first):
        raise VerificationError(
            f"stage {program.stage}: the first step updates before any norm is known"
        )
    for part, instructions in (("step", program.step), deferred):
        _check_rows(program, graph, part, _updates(instructions))


def _updates(instructions: tuple[Instruction, ...]) -> list[Action]:
    return list(expand(only(instructions, (Op.UPDATE,))))


def _check_rows(program: Program, graph: Graph, part: str, updates: list[Action]) -> None:
    """Every piece and chunk of optimizer state is used once, and every row has a piece."""
    contents = [ref.content for action in updates for ref in action.writes]
    written = [content for content in contents if content.kind is Holds.STATE]
    used, distinct = (Counter(c.layer for c in chunks) for chunks in (written, set(written)))
    pieces, rows = Counter[int](), Counter[int]()
    for buffer in program.buffers.values():
        if buffer.home_of and is_home(buffer, {Holds.STATE}):
            pieces[buffer.home_of.layer] += buffer.count
    times = Counter(action.layer for action in updates)
    for action in updates:
        rows[action.layer] += action.amount
    for layer, owned in _owned(program, graph).items():
        once = used[layer] == distinct[layer] == pieces[layer]
        # A shard, and each chunk, rounds up to whole elements.
        if not once or not owned <= rows[layer] <= owned + times[layer]:
            raise VerificationError(
                f"stage {program.stage}: in the {part}, layer {layer} updates {rows[layer]} of its "
                f"{owned} elements, in {used[layer]} of {pieces[layer]} pieces"
            )


def _owned(program: Program, graph: Graph) -> dict[int, int]:
    """Elements that a rank updates, by layer; where layers are frozen, of adapters alone."""
    if graph.frozen:
        adapters = graph.adapters(program.layers).elements
        return {**dict.fromkeys(program.layers, 0), ADAPTERS: adapters}
    ranks = graph.strategy.zero_ranks
    return {layer: graph.kinds[graph.layers[layer]].owned(ranks) for layer in program.layers}


def _check_messages(programs: Sequence[Program], graph: Graph) -> None:
    """Neighbours send exactly what the other receives, in the same order.

    With virtual stages the last stage's neighbour is the first. A table that the first stage lends
    goes to the last once; its gradients, if there are any, come back once.
    """
    for part in ("first", "step", "evaluate"):
        sent, received = (
            [_messages(getattr(program, part), op) for program in programs]
            for op in (Op.SEND, Op.RECV)
        )
        table = HeldContent(Content(Holds.PARAMETERS, 0))
        lends = graph.lends_table and getattr(programs[0], part)
        if lends and sent[0][Holds.PARAMETERS] != [table]:
            raise VerificationError(f"stage 0: the {part} does not send {table} once")
        for up in range(len(programs)):
            down = (up + 1) % len(programs)
            for kind, sender, receiver in (
                (Holds.HIDDEN, up, down),
                (Holds.HIDDEN_GRADIENT, down, up),
                (Holds.PARAMETERS, down, up),
                (Holds.PARTIAL_GRADIENTS, up, down),
            ):
                out, come = sent[sender][kind], received[receiver][kind]
                if out != come:
                    raise VerificationError(
                        f"stage {programs[sender].stage} sends {len(out)} messages of "
                        f"{kind} to stage {programs[receiver].stage}, which receives {len(come)}, "
                        "or in another order"
                    )


def _messages(instructions: tuple[Instruction, ...], op: Op) -> dict[Holds, list[HeldContent]]:
    """What is sent or received, in order, by kind: hidden states or their gradients."""
    found: dict[Holds, list[HeldContent]] = defaultdict(list)
    for action, number in walk(only(instructions, (op,))):
        ref = (action.reads if op is Op.SEND else action.writes)[0]
        found[ref.content.kind].append(held(ref, number))
    return found


# Ops by communicator: those of data-parallel ranks (with zero groups there are two, on one lane),
# and the tensor-parallel one, which layers use too.
COLLECTIVES = ((Op.REDUCE, Op.SUM_REPLICAS, Op.GATHER), (Op.TENSOR_REDUCE, Op.FORWARD, Op.BACKWARD))


def _check_collectives(programs: Sequence[Program]) -> None:
    """Collectives of a communicator are on one lane, so every rank issues them in one order.

    All ranks of a stage run the same program. So only a collective on another lane, where nothing
    orders it against the others, can break the order.
    """
    for program in programs:
        for instructions in (program.first, program.step, program.flush):
            for ops in COLLECTIVES:
                lanes = {a.lane for a, _ in counted(only(instructions, ops))}
                if len(lanes) > 1:
                    names = ", ".join(sorted(lanes))
                    raise VerificationError(
                        f"stage {program.stage}: collectives of one communicator on lanes {names}"
                    )


def rank_bytes(programs: Sequence[Program], tier: Tier) -> int:
    """Bytes of the fullest rank."""
    return max(program.bytes_by_tier()[tier] for program in programs)


def used_bytes(programs: Sequence[Program], tier: Tier, sharing: NodeSharing) -> int:
    """Bytes of the fullest GPU, or node: its ranks are of neighbouring stages, or of one stage."""
    return sharing.counted(rank_bytes(programs, tier), tier.scope)


def _check_memory(
    programs: Sequence[Program], capacity: Mapping[Tier, int], sharing: NodeSharing
) -> None:
    """Allocations of every tier fit its capacity."""
    for program in programs:
        used = program.bytes_by_tier()[Tier.GPU]
        if used > capacity[Tier.GPU]:
            raise VerificationError(
                f"stage {program.stage}: {used} bytes on a GPU of {capacity[Tier.GPU]}"
            )
    for tier in (Tier.HOST, Tier.NVME):
        used = used_bytes(programs, tier, sharing)
        if used > capacity[tier]:
            raise VerificationError(f"{used} bytes on {tier} of {capacity[tier]} per node")
