"""A state space by its kernels (kernels/handwritten): what they move and multiply.

A kernel is a Stream of what it reads and writes, once each: programs that read the same run side by
side, and the second finds it in cache. Its products are beside it. The backward runs all of the
forward again, with the norm behind the gate, and keeps what it made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.state_space_sizes import Rank, norms_alone
from bigplan.mechanics import (
    GATED_NORM_ROWS,
    SPACE_CHUNK,
    SUMMED_TOKENS,
    space_heads_together,
    space_in_kernels,
)

WIDE = 2  # elements of 16 bits in one of fp32


class _Each(NamedTuple):
    """So many of each element, in 16 bits: of a tensor as large as values, as keys, as the keys of
    each program that has some heads of a group, of states, and of a number of each head and token.
    """

    values: float = 0.0
    keys: float = 0.0
    sums: float = 0.0
    states: float = 0.0
    numbers: float = 0.0

    def elements(self, rank: Rank) -> float:
        """Of a rank together; the last chunk of a sequence counts as full."""
        programs = rank.heads // _together(rank)
        return (
            self.values * rank.values
            + self.keys * rank.keys
            + self.sums * rank.tokens * programs * rank.space.state
            + self.states * rank.states
            + self.numbers * rank.tokens * rank.heads
        )


class _Kernel(NamedTuple):
    """What it moves, and how many products of each kind a chunk has."""

    name: str
    moved: _Each
    launches: int = 1
    scores: int = 0  # of a chunk's tokens with each other, by keys, of heads together
    values: int = 0  # of such scores with values, of each head
    states: int = 0  # of a chunk's tokens with a head's state
    traces: int = 0  # of a head's state with that of its gradient
    walks: bool = False  # chunk after chunk


FILTERED = _Kernel("state space's heads", _Each(2, 4), launches=3)
STEPPED = _Kernel("state space's steps", _Each(numbers=1 + 2 * WIDE))
WALKED = _Kernel("state space's states", _Each(1, 1, 0, 1, 2 * WIDE), states=1, walks=True)
READ = _Kernel("state space's reads", _Each(2, 2, 0, 1, 2 * WIDE), scores=1, values=1, states=1)
FORWARD = (FILTERED, STEPPED, WALKED, READ)
WALKED_BACK = _Kernel("state space's states back", _Each(1, 1, 0, 1, WIDE), states=1, walks=True)
GIVEN_BACK = _Kernel(
    "state space's updates back", _Each(3, 2, 2, 1, 4 * WIDE), scores=3, values=2, states=2
)
ASKED_BACK = _Kernel("state space's reads back", _Each(1, 1, 2, 2, 3 * WIDE), states=1, traces=1)
STEPPED_BACK = _Kernel("state space's steps back", _Each(numbers=2 + 3 * WIDE), launches=5)
BACKWARD = (WALKED_BACK, GIVEN_BACK, ASKED_BACK, STEPPED_BACK)
# Most that lives at once: heads, states and numbers; Y takes no more than the result, which is
# saved. In the backward, either with gradients by states, or with those by heads and by what their
# convolution sums; beside them the norm's result, and gradients by gates and by Y.
MOST = _Each(1, 2, 0, 1, 2 * WIDE)
MOST_BACK = _Each(5, 2, 2, 2, 1 + 4 * WIDE), _Each(7, 2, 2, 1, 1 + 4 * WIDE)


class _Norm(NamedTuple):
    """Behind the gate: its operators, and what lives during it, and during its backward."""

    forward: _Kernel
    backward: _Kernel
    most: _Each
    most_back: _Each


# Sums of the weight's gradient are written and read.
NORM = _Norm(
    _Kernel("state space's norm", _Each(3)),
    _Kernel("state space's norm back", _Each(5 + 2 * WIDE / GATED_NORM_ROWS), 3),
    _Each(1),
    _Each(5, 2, 0, 1, 2 * WIDE),
)
# A kernel for the gate, then runtime/parallel/wide_norm.py by plain torch, in fp32: its reads and
# writes as they stand there.
SHARED_NORM = _Norm(
    _Kernel("state space's norm", _Each(5 + 9 * WIDE), 10),
    _Kernel("state space's norm back", _Each(8 + 22 * WIDE), 18),
    _Each(1 + 3 * WIDE),
    _Each(4 + 4 * WIDE, 2, 0, 1, 2 * WIDE),
)


# Without a norm, a kernel for the gate alone.
GATE = _Norm(
    _Kernel("state space's gate", _Each(3)),
    _Kernel("state space's gate back", _Each(5)),
    _Each(1),
    _Each(5, 2, 0, 1, 2 * WIDE),
)
# Factors of gates, plain torch: read and written, and so are gradients. Those of filters and time
# steps, which are few, are kernels more.
SCALED = _Kernel("state space's factors", _Each(2), 5)
SCALED_BACK = _Kernel("state space's factors back", _Each(2), 10)


def take(shape: RankShape) -> bool:
    """Whether kernels run the state space: they know of no documents."""
    space = Rank.of(shape).space
    if shape.training.isolate_documents:
        return False
    widths = space.state, space.head_dim
    return shape.generated and space_in_kernels(shape.element, widths, space.taps)


def state_space(shape: RankShape) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """The state space between the block's first and last product, forward and backward."""
    rank, norm = Rank.of(shape), _norm(shape)
    scaled, scaled_back = ((SCALED,), (SCALED_BACK,)) if rank.space.scales else ((), ())
    forward = *FORWARD, *scaled, norm.forward
    backward = *forward, norm.backward, *BACKWARD, _filtered_back(rank), *scaled_back
    first, second = (
        tuple(one for kernel in kernels for one in _operators(kernel, rank, shape.element))
        for kernels in (forward, backward)
    )
    return first, second


def _norm(shape: RankShape) -> _Norm:
    if not Rank.of(shape).space.norm:
        return GATE
    return NORM if norms_alone(shape) else SHARED_NORM


def _filtered_back(rank: Rank) -> _Kernel:
    """Three kernels for each of values, keys and queries, and sums of filters' gradients."""
    sums = 2 * WIDE * (rank.space.taps + rank.space.convolution_bias) / SUMMED_TOKENS
    return _Kernel("state space's heads back", _Each(7 + sums, 12 + 2 * sums, 2), launches=18)


def _together(rank: Rank) -> int:
    return space_heads_together(rank.heads // rank.groups)


def _operators(kernel: _Kernel, rank: Rank, element: int) -> Iterator[Operator]:
    moved = element * kernel.moved.elements(rank)
    yield Stream(kernel.name, moved, kernel.launches, generated=True)
    c, n, d, heads = SPACE_CHUNK, rank.space.state, rank.space.head_dim, rank.head_chunks
    if kernel.scores:
        batch = heads // _together(rank)
        yield Gemm(kernel.name, c, c, n, batch, kernel.scores, inside=True)
    if kernel.values:
        yield Gemm(kernel.name, c, d, c, heads, kernel.values, inside=True)
    if kernel.states:
        batch, times = (heads // rank.chunks, rank.chunks) if kernel.walks else (heads, 1)
        yield Gemm(kernel.name, c, d, n, batch, kernel.states * times, inside=True)

    if kernel.traces:
        yield Gemm(kernel.name, d, d, n, heads, kernel.traces, inside=True)


def forward_bytes(shape: RankShape) -> int:
    """Bytes that a forward takes beside what it saves."""
    return _most(shape, MOST, _norm(shape).most)


def backward_bytes(shape: RankShape) -> int:
    """Bytes that the backward takes beyond what its forward saved."""
    return _most(shape, *MOST_BACK, _norm(shape).most_back)


def _most(shape: RankShape, *times: _Each) -> int:
    rank = Rank.of(shape)
    return shape.element * int(max(each.elements(rank) for each in times))
