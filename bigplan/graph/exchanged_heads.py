"""Heads that context-parallel ranks exchange for tokens, around attention and what is in its place.

Each rank has a part of every sequence with all heads. It sends the others their heads and gets
their parts, which is an all-to-all of every kind of head, and of the result (Jacobs et al. 2023,
arXiv 2309.14509, section 3). A head that several ranks need goes to each. Parts are copied to lie
one behind the other, on both sides where a micro-batch has several sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

from bigplan.graph.operators import Collective, Operator, Stream
from bigplan.graph.shape import RankShape

Columns = Mapping[str, int]  # of a rank's heads within the mixer, by what they are


def exchanges(shape: RankShape, columns: Columns) -> tuple[Operator, ...]:
    """What ranks do around a mixer, forward; the backward does the same back."""
    if shape.cp == 1:
        return ()
    found, sides = list[Operator](), 1 + (shape.strategy.micro_batch > 1)
    for name, number in columns.items():
        nbytes = shape.mixed_tokens * number * shape.element
        found.append(Collective(f"{name} exchange", "all_to_all", nbytes))
        found.append(Stream(f"{name} in parts", 2 * sides * nbytes, sides))
    return tuple(found)


def exchange_bytes(shape: RankShape, columns: Columns) -> int:
    """Bytes of the largest exchange under way: what is sent, and what comes."""
    if shape.cp == 1:
        return 0
    return 2 * shape.mixed_tokens * max(columns.values()) * shape.element
