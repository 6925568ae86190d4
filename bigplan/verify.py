"""Rules that every program keeps, checked before it is simulated or run.

The checks know nothing of the solver or of how the program was made: they follow what every buffer
entry holds, action by action, over two consecutive steps (the first, and a steady one after it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from bigplan.errors import VerificationError
from bigplan.graph.graph import Graph
from bigplan.placement import Tier
from bigplan.program import Action, Instruction, Op, Program, content, entry, expand

LASTING = ("w", "o")  # parameters and optimizer state outlive the step


def verify(
    programs: Sequence[Program], graph: Graph, capacity: Mapping[Tier, int], ranks_per_node: int
) -> None:
    """Raise VerificationError at the first broken rule of any stage."""
    for program in programs:
        _check_contents(program)
        for instructions in (program.first, program.step):
            _check_work(program, graph, instructions)
        _check_updates(program, graph)
    _check_messages(programs)
    _check_collectives(programs)
    _check_memory(programs, capacity, ranks_per_node)


def _fail(program: Program, action: Action, rule: str) -> VerificationError:
    return VerificationError(
        f"stage {program.stage}: {action.op} of layer {action.layer}, "
        f"micro-batch {action.micro_batch}: {rule}"
    )


def _check_contents(program: Program) -> None:
    """Nothing is read before it is there, after it was freed, or after an update made it stale."""
    held = {
        (buffer.name, i): buffer.name if buffer.tier is not Tier.NVME or buffer.count == 1 else ""
        for buffer in program.buffers.values()
        if buffer.name[0] in LASTING
        for i in range(buffer.count)
    }
    for buffer in program.buffers.values():
        if buffer.name.startswith("o") and buffer.name.endswith(".nvme"):
            layer = buffer.name[1:].removesuffix(".nvme")
            held.update({(buffer.name, i): f"o{layer}.{i}" for i in range(buffer.count)})
    for instructions in (program.first, program.step, program.flush):
        for action in expand(instructions):
            _play(program, action, held)


def _play(program: Program, action: Action, held: dict[tuple[str, int], str]) -> None:
    for ref in (*action.reads, *action.frees):
        if ref.buffer not in program.buffers:
            raise _fail(program, action, f"buffer {ref.buffer!r} does not exist")
        key, expected = entry(ref, program.buffers, action.micro_batch), content(
            ref, action.micro_batch
        )
        found = held.get(key)
        if found != expected:
            where = f"{key[0]}[{key[1]}]"
            raise _fail(program, action, f"{where} holds {found or 'nothing'}, not {expected}")
    for ref in action.writes:
        if ref.buffer not in program.buffers:
            raise _fail(program, action, f"buffer {ref.buffer!r} does not exist")
        held[entry(ref, program.buffers, action.micro_batch)] = content(ref, action.micro_batch)
    for ref in action.frees:
        held.pop(entry(ref, program.buffers, action.micro_batch), None)
    if action.op is Op.UPDATE:
        _forget_copies(action, held)


def _forget_copies(action: Action, held: dict[tuple[str, int], str]) -> None:
    """Copies of the layer's parameters made before its update are stale."""
    name = f"w{action.layer}"
    written = {ref.buffer for ref in action.writes}
    for key in [k for k, v in held.items() if v == name and k[0] != name]:
        if key[0] not in written:
            del held[key]


def _check_work(program: Program, graph: Graph, instructions: tuple[Instruction, ...]) -> None:
    """Every layer runs forward and backward once on every micro-batch, forward first."""
    done: Counter[tuple[Op, int, int]] = Counter()
    for action in expand(instructions):
        if action.op in (Op.FORWARD, Op.BACKWARD):
            done[action.op, action.layer, action.micro_batch] += 1
            if action.op is Op.BACKWARD:
                key = (Op.FORWARD, action.layer, action.micro_batch)
                if not done[key]:
                    raise _fail(program, action, "runs before its forward")
    expected = {
        (op, layer, m)
        for op in (Op.FORWARD, Op.BACKWARD)
        for layer in program.layers
        for m in range(graph.micro_batches)
    }
    wrong = sorted(str(key) for key in expected ^ set(done)) + sorted(
        str(key) for key, times in done.items() if times > 1
    )
    if wrong:
        raise VerificationError(
            f"stage {program.stage}: missing, repeated or foreign work: {', '.join(wrong[:3])}"
        )


def _check_updates(program: Program, graph: Graph) -> None:
    """Every row of every layer is updated exactly once: in each step, or, deferred, in the flush."""
    elements = _updated(program.step)
    if graph.clipped:
        if _updated(program.first):
            raise VerificationError(
                f"stage {program.stage}: the first step updates before any norm is known"
            )
        pairs = [elements, _updated(program.flush)]
    else:
        pairs = [elements, _updated(program.first)]
    strategy = graph.strategy
    for layer in program.layers:
        whole = graph.kinds[graph.layers[layer]].parameters
        owned = -(-whole // strategy.dp) if strategy.zero else whole
        for updated in pairs:
            # A shard, and each chunk, rounds up to whole elements.
            slack = sum(b.count for b in program.buffers.values() if b.name.startswith(f"o{layer}."))
            if not owned <= updated.get(layer, 0) <= owned + slack:
                raise VerificationError(
                    f"stage {program.stage}: layer {layer} updates {updated.get(layer, 0)} "
                    f"of its {owned} elements in a step"
                )


def _updated(instructions: tuple[Instruction, ...]) -> Counter[int]:
    totals: Counter[int] = Counter()
    for action in expand(instructions):
        if action.op is Op.UPDATE:
            totals[action.layer] += action.amount
    return totals


def _check_messages(programs: Sequence[Program]) -> None:
    """Neighbours send exactly what the other receives, in the same order."""
    for upstream, downstream in zip(programs, programs[1:], strict=False):
        for label, sender, receiver in (("h", upstream, downstream), ("d", downstream, upstream)):
            sent = list(_messages(sender, Op.SEND, label))
            received = list(_messages(receiver, Op.RECV, label))
            if sent != received:
                raise VerificationError(
                    f"stage {sender.stage} sends {len(sent)} {label!r} messages to stage "
                    f"{receiver.stage}, which receives {len(received)}, or in another order"
                )


def _messages(program: Program, op: Op, label: str) -> Iterable[str]:
    for action in expand(program.step):
        if action.op is op:
            refs = action.reads if op is Op.SEND else action.writes
            if refs[0].content.startswith(label):
                yield content(refs[0], action.micro_batch)


def _check_collectives(programs: Sequence[Program]) -> None:
    """Collectives of a communicator are on one lane, so every rank issues them in one order.

    All ranks of a stage run the same program; what can break the order is a collective that
    was put on another lane, where nothing orders it against the others.
    """
    for program in programs:
        for instructions in (program.first, program.step, program.flush):
            lanes = {a.lane for a in expand(instructions) if a.op in (Op.REDUCE, Op.GATHER)}
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
