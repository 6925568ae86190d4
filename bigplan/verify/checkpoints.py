"""What a checkpoint reads, and the rule that nothing changes it afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from bigplan.content import ADAPTERS, Holds
from bigplan.errors import VerificationError
from bigplan.graph.graph import Graph
from bigplan.program import Buffer, Instruction, Op, Program, Repeat, entry, expand, only
from bigplan.verify.contents import Key, fail, is_home


def check_checkpoints(program: Program, graph: Graph) -> None:
    """Parts with CKPTs equal their plain parts otherwise, and read each home's last state once.

    Moments are state, and so are parameters where no master copy is among the moments.
    """
    kinds = {Holds.STATE} if graph.sizes.master else {Holds.STATE, Holds.PARAMETERS}
    buffers = program.buffers
    homes = {
        (b.name, i)
        for b in buffers.values()
        if is_home(b, kinds) and _trained(b, graph)
        for i in range(b.count)
    }
    for part, plain in (("checkpoint", program.step), ("save", ())):
        instructions: tuple[Instruction, ...] = getattr(program, part)
        if instructions and only(instructions, set(Op) - {Op.CKPT}) != plain:
            raise VerificationError(
                f"stage {program.stage}: without its CKPTs the {part} is another program"
            )
        read = Counter[Key]()
        for action in expand(tuple(_touching(instructions, {name for name, _ in homes}))):
            if action.op is Op.CKPT:
                read.update(entry(ref, buffers, -1) for ref in action.reads)
            elif any(entry(ref, buffers, action.micro_batch) in read for ref in action.writes):
                raise fail(program, action, "changes what a checkpoint has read already")
        if instructions and read != Counter(homes):
            wrong = sorted(
                f"{name}[{i}]" for name, i in (read - Counter(homes)) + (Counter(homes) - read)
            )
            raise VerificationError(
                f"stage {program.stage}: the {part} does not write once: {', '.join(wrong[:3])}"
            )


def _trained(buffer: Buffer, graph: Graph) -> bool:
    """Whether what is at home there changes: of frozen layers nothing does."""
    assert buffer.home_of is not None
    return buffer.home_of.layer == ADAPTERS or not graph.frozen


def _touching(instructions: Iterable[Instruction], names: set[str]) -> Iterator[Instruction]:
    """The actions that write one of the buffers, or a checkpoint of it.

    Repeated blocks of passes hold none of these. So a program of a thousand micro-batches is not
    unrolled for them.
    """
    for instruction in instructions:
        if isinstance(instruction, Repeat):
            body = tuple(_touching(instruction.body, names))
            if body:
                yield Repeat(instruction.count, instruction.stride, body)
        elif instruction.op is Op.CKPT or any(ref.buffer in names for ref in instruction.writes):
            yield instruction
