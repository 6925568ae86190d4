"""Attention of heads too wide for flash kernels: matrix products, and kernels between them.

Counted on runtime/attention/by_products.py, which has the scores of some queries in memory.
"""

from __future__ import annotations

from bigplan.graph.operators import Gemm, Stream, doubled_reach
from bigplan.graph.shape import RankShape
from bigplan.mechanics import wide_queries

# Products forward and backward: scores and the result, and backward scores again, gradients by
# probabilities, values, keys and queries.
PRODUCTS = 2, 5
# Bytes that a score moves. The forward writes and reads 4, writes a probability of 2 and reads it.
# The backward writes and reads two of 4, writes two of 2 and reads one of them again.
SCORE_BYTES = 12, 26
# Times that queries' tensors pass memory. The forward copies queries to rows, reads these, writes
# the result's rows and copies them. The backward has three such tensors, and reads two twice.
QUERY_PASSES = 6, 11
# Of keys' tensors, keys and values together: once, and for each block of queries that sees them.
# The forward copies both and reads them. The backward also has their gradients in fp32, which it
# fills with zeros, adds to and casts.
KEY_PASSES, KEY_PASSES_OF_BLOCKS = (4, 14), (2, 11)
# Kernels of a block of queries, and copies of whole tensors.
BLOCK_LAUNCHES, COPIES = (3, 6), (4, 9)
ALIGNED = 8  # keys that a block sees on average, which a mean need not be a multiple of

Pass = tuple[Gemm, Stream]  # products, and what they and all between them move


def attention(shape: RankShape, reach: tuple[int, int | None], part: float) -> tuple[Pass, Pass]:
    """Operators forward and backward of the blocks with this reach, which are `part` of all.

    A query sees half a block of keys more than it may.
    """
    together, width = min(_together(shape), reach[0]), shape.model.head_dim
    seen = doubled_reach(*reach) / 2 + together / 2
    blocks = -(-shape.training.sequence_length // together)
    keys = max(1, round(part * seen / ALIGNED)) * ALIGNED
    matrices = shape.strategy.micro_batch * shape.kv_heads * blocks
    rows = shape.mixed_tokens * shape.heads
    queries, shared = (shape.mixed_tokens * n * width for n in (shape.heads, shape.kv_heads))
    found: list[Pass] = []
    for back in (0, 1):
        product = Gemm(
            "attention", together * shape.heads // shape.kv_heads, keys, width, matrices,
            PRODUCTS[back], inside=True,
        )  # fmt: skip
        passes = KEY_PASSES[back] + KEY_PASSES_OF_BLOCKS[back] * seen / together
        moved = QUERY_PASSES[back] * queries + passes * shared
        launches = round(part * (blocks * BLOCK_LAUNCHES[back] + COPIES[back]))
        nbytes = part * (moved * shape.element + SCORE_BYTES[back] * rows * seen)
        found.append((product, Stream("attention's scores", nbytes, launches)))
    return found[0], found[1]


def buffers(shape: RankShape) -> int:
    """Bytes of the backward beside gradients of the heads.

    Copies of queries, of the result's gradient and of that by queries; of keys and values, and
    their gradients in fp32; two scores in fp32 and two in 16 bits for each pair of a block.
    """
    copies = 3 * shape.heads * shape.element + shape.kv_heads * (2 * shape.element + 2 * 4)
    scores = shape.heads * _together(shape) * (2 * 4 + 2 * shape.element)
    return shape.mixed_tokens * (copies * shape.model.head_dim + scores)


def _together(shape: RankShape) -> int:
    """Queries of a block."""
    length = shape.training.sequence_length
    return min(wide_queries(shape.strategy.micro_batch * shape.heads * length), length)
