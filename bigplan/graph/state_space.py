"""A state space on one rank: what it moves, multiplies and takes.

Products and passes are those of runtime/mixers/state_space.py, plain torch, whose backward runs the
forward again. On CUDA its gate and norm are a generated kernel, unless ranks share a group. Where
generated kernels take the place of all of it they are those of state_space_kernels.py.
"""

from __future__ import annotations

from typing import NamedTuple

from bigplan.graph import state_space_kernels as kernels
from bigplan.graph.exchanged_heads import Columns, exchange_bytes
from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.state_space_sizes import Rank, norms_alone
from bigplan.mechanics import SPACE_CHUNK
from bigplan.spec.mixers import STATE_SPACE

FP32 = 4  # bytes
Launches = tuple[int, int, int]  # of all, of a chunk, of a token that the convolution reads before


class _Each(NamedTuple):
    """Of each element of a tensor as large as values, or as keys, of heads' scores in a chunk, and
    of states that chunks begin with: in the compute dtype, and those that are always fp32.
    """

    values: float
    wide_values: float
    keys: float
    scores: float
    wide_scores: float
    states: float
    wide_states: float

    def without(self, saved: _Saved) -> _Each:
        """With fewer of values."""
        return self._replace(
            values=self.values - saved.values, wide_values=self.wide_values - saved.wide_values
        )

    def of(self, shape: RankShape) -> float:
        """Bytes of a rank's elements together."""
        rank, size = Rank.of(shape), shape.element
        return (
            (self.values * size + self.wide_values * FP32) * rank.values
            + self.keys * size * rank.keys
            + (self.scores * size + self.wide_scores * FP32) * rank.head_chunks * SPACE_CHUNK**2
            + (self.states * size + self.wide_states * FP32) * rank.states
        )


class _Saved(NamedTuple):
    """What a generated kernel saves of values, as `_Each` has them, and of kernels."""

    values: float
    wide_values: float
    launches: int


# Reads and writes by all operators but products, and the most that lives at once. Counted on the
# runtime's operators in bf16 and fp32, 28 sizes each, and fitted within 9%, peaks within 11%.
# tests/runtime/mixers/test_state_space.py counts again.
PASSES, PASSES_BACK = _Each(19, 13, 12, 2, 8.5, 0.5, 5.5), _Each(67, 44, 47, 5, 23, 0, 14)
MOST, MOST_BACK = _Each(7, 1, 3, 1, 0, 2, 0), _Each(8.5, 6, 4, 0, 2.5, 1, 1)
# Of these gate and norm take 7 and 9 of values forward, and 13 and 26 backward beside the forward
# again. A generated kernel takes three passes forward, five backward.
SAVED, SAVED_BACK = _Saved(4, 9, 10), _Saved(12, 35, 28)
# Without a norm, plain torch has less: counted within 13%. It is priced as holding as much, which
# is up to 1.57 times what it does. A kernel for the gate alone takes as much as the other.
UNNORMED, UNNORMED_BACK = _Saved(2, 9, 9), _Saved(6, 35, 27)
# Factors: gates are read and written once more, and again backward beside their gradients. Those of
# time steps and filters are small. Kernels are one each of gates, time steps and three filters.
SCALED_PASSES, SCALED_LAUNCHES = (2, 4), (5, 15)
# Of a token that the convolution reads before its own: an element of values, keys and queries.
TAP_PASSES, TAP_PASSES_BACK = 3, 14
# Kernels beside products.
LAUNCHES, LAUNCHES_BACK = (50, 2, 3), (144, 8, 18)
# More of such a tap and of kernels where documents are kept apart, whose tokens are multiplied by
# masks. Counted with two to four taps; the few passes over masks of scores are among a tap's.
HIDDEN_TAP, HIDDEN_TAP_BACK = 2, 6
HIDDEN, HIDDEN_BACK = (8, 0, 12), (11, 0, 36)
# On a GPU most of these kernels read operands that are broadcast or strided, which torch does not
# vectorise: an H200 took 8.1 ms for 16.8 GB, which it copies in 4.0, of 4,096 tokens of
# granite-4.0-h-micro (benchmarks/results/2026-11-27-h200-state-space).
STRIDED = 2.0
# There the host takes as long for one of these kernels as for five others that are launched one
# after the other (Gpu.launch_overhead): 17.1 ms for the 655 of a backward, each with autograd.
LAUNCHED = 5


def state_space(shape: RankShape) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """The state space between the block's first and last product, forward and backward."""
    if kernels.take(shape):
        return kernels.state_space(shape)
    rank = Rank.of(shape)
    channels = rank.heads * rank.space.head_dim + 2 * rank.groups * rank.space.state
    convolved, taps = shape.mixed_tokens * channels * shape.element, rank.space.taps - 1
    by_kernels = shape.generated and norms_alone(shape)
    slower, each_launch = (STRIDED, LAUNCHED) if shape.fused else (1.0, 1)

    def stream(passes: _Each, of_tap: int, launches: Launches, side: int) -> Stream:
        saved = _saved(rank, by_kernels=by_kernels)[side]
        nbytes = passes.without(saved).of(shape) + of_tap * taps * convolved
        number = sum(n * each for n, each in zip((1, rank.chunks, taps), launches, strict=True))
        number -= saved.launches
        return Stream(STATE_SPACE, slower * nbytes, each_launch * number)

    tap, tap_back, launches, back = TAP_PASSES, TAP_PASSES_BACK, LAUNCHES, LAUNCHES_BACK
    if shape.training.isolate_documents:
        tap, tap_back = tap + HIDDEN_TAP, tap_back + HIDDEN_TAP_BACK
        launches, back = _sum(launches, HIDDEN), _sum(back, HIDDEN_BACK)
    forward = stream(PASSES, tap, launches, 0)
    backward = stream(PASSES_BACK, tap_back, back, 1)
    again = _products(rank)
    return (forward, *again), (backward, *again, *_products_back(rank))


def _saved(rank: Rank, *, by_kernels: bool) -> tuple[_Saved, _Saved]:
    """What is less, forward and backward, than with a norm of plain torch and without factors."""
    found = (_Saved(0, 0, 0),) * 2
    if by_kernels:
        found = SAVED, SAVED_BACK
    elif not rank.space.norm:
        found = UNNORMED, UNNORMED_BACK
    if not rank.space.scales:
        return found
    more = zip(found, SCALED_PASSES, SCALED_LAUNCHES, strict=True)
    ahead, back = (_Saved(s.values - n, s.wide_values, s.launches - times) for s, n, times in more)
    return ahead, back


def _sum(one: Launches, two: Launches) -> Launches:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2]


def _products(rank: Rank) -> tuple[Gemm, ...]:
    n, c, wide, batches = rank.space.state, SPACE_CHUNK, rank.beside, rank.batches
    heads = rank.head_chunks
    return (
        Gemm("state space's scores", c, c, n, batches),
        Gemm("state space's values", c, rank.space.head_dim, c, heads),
        Gemm("state space's updates", n, wide, c, batches),
        Gemm("state space's reads", c, wide, n, batches),
    )


def _products_back(rank: Rank) -> tuple[Gemm, ...]:
    """Two for each of the forward."""
    n, c, wide, batches = rank.space.state, SPACE_CHUNK, rank.beside, rank.batches
    heads, dim = rank.head_chunks, rank.space.head_dim
    return (
        Gemm("state space's scores by both", c, n, c, batches, 2),
        Gemm("state space's values by scores", c, c, dim, heads),
        Gemm("state space's values by values", c, dim, c, heads),
        Gemm("state space's updates by keys", c, n, wide, batches),
        Gemm("state space's updates by values", c, wide, n, batches),
        Gemm("state space's reads by queries", c, n, wide, batches),
        Gemm("state space's reads by states", n, wide, c, batches),
    )


def heads(shape: RankShape) -> Columns:
    """Columns of heads that context-parallel ranks exchange."""
    rank = Rank.of(shape)
    values, keys = rank.heads * rank.space.head_dim, rank.groups * rank.space.state
    return {
        "space's values": values,
        "space's keys": keys,
        "space's queries": keys,
        "time steps": rank.heads,
        "state space's values": values,
    }


def forward_bytes(shape: RankShape) -> int:
    """Bytes that a forward takes beside what it saves."""
    most = kernels.forward_bytes(shape) if kernels.take(shape) else int(MOST.of(shape))
    return max(most + _scaled_gates(shape), exchange_bytes(shape, heads(shape)))


def backward_bytes(shape: RankShape) -> int:
    """Bytes that the backward takes beyond what its forward saved."""
    most = kernels.backward_bytes(shape) if kernels.take(shape) else int(MOST_BACK.of(shape))
    return most + _scaled_gates(shape)


def _scaled_gates(shape: RankShape) -> int:
    """Bytes of gates times their factor, which live while what heads read is gated."""
    rank = Rank.of(shape)
    return rank.values * shape.element if rank.space.scales else 0
