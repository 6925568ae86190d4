"""A gated delta rule by its kernels (kernels/handwritten): what they move and multiply.

A kernel is a Stream of what it reads and writes, once each: programs that read the same run side by
side, and the second finds it in cache. Its products are beside it. A program's chunk is 64 tokens,
so products have a side of 64, and those of the states wait for the chunk before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bigplan.graph.delta_rule_sizes import Each, chunks_of, heads_of, rule_of, sequences_of
from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.graph.shape import RankShape
from bigplan.mechanics import RULE_CHUNK, rule_in_kernels

# Products that double the blocks of an inverse, from 2 tokens to 64: two each.
INVERTING = 2 * (RULE_CHUNK.bit_length() - 2)
# A product of fp32 in tf32 takes tensor cores twice as long as one of 16 bits (NVIDIA's A100, H100
# and B200 datasheets).
TF32 = 2


class _Kernel(NamedTuple):
    """Elements that it reads and writes, and how many products of each kind a chunk has."""

    name: str
    moved: Each
    launches: int = 1
    keys: int = 0  # of a chunk's tokens with each other, of keys' width
    values: int = 0  # likewise of values' width
    states: int = 0  # of a chunk's tokens with a state
    square: int = 0  # of such scores with each other
    walks: bool = False  # chunk after chunk


FILTERED = _Kernel("delta rule's heads", Each(4, 2, 0, 0), launches=3)
SOLVED = _Kernel("delta rule's system", Each(1, 2, 1, 0), keys=2, values=1, square=TF32 * INVERTING)
WALKED = _Kernel("delta rule's states", Each(1, 2, 1, 0, 1), states=2, walks=True)
READ = _Kernel("delta rule's reads", Each(2, 2, 0, 0, 1), keys=1, values=1, states=1)
NORMED = _Kernel("delta rule's norm and gate", Each(0, 3, 0, 0))
FORWARD = (FILTERED, SOLVED, WALKED, READ, NORMED)
BACKWARD = (
    FILTERED,
    SOLVED._replace(moved=Each(1, 2, 1, 1)),
    WALKED,
    READ,
    _Kernel("delta rule's norm and gate back", Each(0, 5, 0, 0), launches=2),
    _Kernel("delta rule's reads by both", Each(2, 3, 2, 0, 1), keys=3, values=2, states=1),
    _Kernel("delta rule's states back", Each(2, 3, 1, 0, 1), states=3, walks=True),
    _Kernel("delta rule's system back", Each(1, 4, 2, 2, 2), keys=2, values=2, states=2),
    _Kernel("delta rule's inverse back", Each(1, 0, 2, 2), keys=3, square=2),
    _Kernel("delta rule's heads back", Each(12, 7, 2, 0), launches=15),
)
# Most that live at once: heads, U, W and states, beside O; in the backward also the inverse, and
# gradients by O in its place, U, gates and values, by queries and keys of each value head, by
# states and by the inverse.
MOST, MOST_BACK = Each(2, 2, 1, 0, 1), Each(2, 6, 3, 2, 2)


def take(shape: RankShape) -> bool:
    """Whether kernels run the rule."""
    rule = rule_of(shape)
    widths = rule.key_dim, rule.value_dim
    return shape.generated and rule_in_kernels(shape.element, widths, rule.taps)


def delta_rule(shape: RankShape) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """The rule between the block's first and last product, forward and backward."""
    forward, backward = (
        tuple(one for kernel in kernels for one in _operators(kernel, shape))
        for kernels in (FORWARD, BACKWARD)
    )
    return forward, backward


def _operators(kernel: _Kernel, shape: RankShape) -> Iterator[Operator]:
    moved = shape.element * kernel.moved.elements(shape)
    yield Stream(kernel.name, moved, kernel.launches, generated=True)
    rule, chunks, c = rule_of(shape), chunks_of(shape), RULE_CHUNK
    heads = sequences_of(shape) * heads_of(shape)[1]
    batch, times = (heads, chunks) if kernel.walks else (heads * chunks, 1)
    filled = -(-rule.key_dim // c) * c  # tiles of keys are filled up
    for count, n, k in (
        (kernel.keys, filled, c),
        (kernel.values, rule.value_dim, c),
        (kernel.states, rule.value_dim, filled),
        (kernel.square, c, c),
    ):
        if count:
            yield Gemm(kernel.name, c, n, k, batch, count * times, inside=True)


def forward_bytes(shape: RankShape) -> int:
    """Bytes that a forward takes beside what it saves."""
    return shape.element * int(MOST.elements(shape))


def backward_bytes(shape: RankShape) -> int:
    """Bytes that the backward takes beyond what its forward saved."""
    return shape.element * int(MOST_BACK.elements(shape))
