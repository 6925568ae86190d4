"""A gated delta rule on one rank: what it moves, multiplies and takes.

Products and passes are those of runtime/mixers/delta_rule.py, plain torch, whose backward runs the
forward again. Its products are in fp32 in every precision. Where generated kernels take its place
they are those of delta_rule_kernels.py.
"""

from __future__ import annotations

from bigplan.graph import delta_rule_kernels as kernels
from bigplan.graph.delta_rule_sizes import Each, chunks_of, heads_of, rule_of, sequences_of
from bigplan.graph.exchanged_heads import Columns, exchange_bytes
from bigplan.graph.operators import Gemm, Operator, Stream
from bigplan.graph.shape import RankShape
from bigplan.mechanics import RULE_CHUNK
from bigplan.spec.mixers import DELTA_RULE

FP32 = 4  # bytes
SYSTEM = "delta rule's system"  # a triangular one, priced as a product with its inverse


# Reads and writes by all operators but products, and the most that lives at once. Counted on the
# runtime's operators in bf16 and fp32, 24 sizes each, and fitted within 6%, peaks within 13%; the
# larger of both where they differ by less than a fifth, else their mean. Chunks count as full.
# tests/runtime/mixers/test_delta_rule.py counts again.
PASSES, PASSES_BACK = Each(36, 35.5, 6, 12, 3), Each(109, 101.5, 40, 52, 11)
MOST, MOST_BACK = Each(4, 6, 4, 4), Each(10, 11, 6, 6)
# Of a token that the convolution reads before its own: an element of queries, keys and values.
TAP_PASSES, TAP_PASSES_BACK = 3, 13
# Kernels beside products: of all, of a chunk, of such a tap.
LAUNCHES, LAUNCHES_BACK = (66, 4, 3), (207, 11, 18)
# More of each where documents are kept apart: such tokens are multiplied by masks. Counted with
# two and four taps; the few passes over masks of scores are among those of a tap.
HIDDEN_TAP, HIDDEN_TAP_BACK = 2, 6.5
HIDDEN, HIDDEN_BACK = (8, 0, 12), (11, 0, 36)


def delta_rule(shape: RankShape) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """The rule between the block's first and last product, forward and backward."""
    if kernels.take(shape):
        return kernels.delta_rule(shape)
    rule, chunks = rule_of(shape), chunks_of(shape)
    keys, values = heads_of(shape)
    channels = 2 * keys * rule.key_dim + values * rule.value_dim
    convolved = shape.mixed_tokens * channels * shape.element
    apart, many = shape.training.isolate_documents, (1, chunks, rule.taps - 1)
    streams = (
        Stream(
            DELTA_RULE,
            FP32 * passes.elements(shape) + (taps + apart * masked) * (rule.taps - 1) * convolved,
            sum(n * (a + apart * b) for n, a, b in zip(many, launches, hidden, strict=True)),
        )
        for passes, taps, launches, masked, hidden in (
            (PASSES, TAP_PASSES, LAUNCHES, HIDDEN_TAP, HIDDEN),
            (PASSES_BACK, TAP_PASSES_BACK, LAUNCHES_BACK, HIDDEN_TAP_BACK, HIDDEN_BACK),
        )
    )
    forward, backward = streams
    again = _products(shape)
    return (forward, *again), (backward, *again, *_products_back(shape))


def _products(shape: RankShape) -> tuple[Gemm, ...]:
    heads, each, chunks = _batches(shape)
    k, v, c = rule_of(shape).key_dim, rule_of(shape).value_dim, RULE_CHUNK
    return _run(
        Gemm("delta rule's scores", c, c, k, each * chunks, 2, fp32=True),
        Gemm(SYSTEM, c, k + v, c, heads * chunks, fp32=True),
        Gemm("delta rule's values", c, v, c, heads, chunks, fp32=True),
        Gemm("delta rule's updates", k, v, c, heads, chunks, fp32=True),
        Gemm("delta rule's reads", c, v, k, heads, 2 * (chunks - 1), fp32=True),
    )


def _products_back(shape: RankShape) -> tuple[Gemm, ...]:
    """Two for each of the forward; nobody reads what the last chunk adds to the state."""
    heads, each, chunks = _batches(shape)
    k, v, c = rule_of(shape).key_dim, rule_of(shape).value_dim, RULE_CHUNK
    return _run(
        Gemm("delta rule's scores by both", c, k, c, each * chunks, 4, fp32=True),
        Gemm(f"{SYSTEM} back", c, k + v, c, heads * chunks, fp32=True),
        Gemm("delta rule's solutions", c, c, k + v, heads * chunks, fp32=True),
        Gemm("delta rule's values by both", c, v, c, heads, 2 * chunks, fp32=True),
        Gemm("delta rule's updates by both", k, v, c, heads, 2 * (chunks - 1), fp32=True),
        Gemm("delta rule's reads by both", c, v, k, heads, 4 * (chunks - 1), fp32=True),
    )


def _batches(shape: RankShape) -> tuple[int, int, int]:
    """A rank's value heads and key heads of all sequences, and the chunks of one sequence."""
    sequences, (each, heads) = sequences_of(shape), heads_of(shape)
    return sequences * heads, sequences * each, chunks_of(shape)


def _run(*products: Gemm) -> tuple[Gemm, ...]:
    return tuple(product for product in products if product.count)


def heads(shape: RankShape) -> Columns:
    """Columns of heads that context-parallel ranks exchange."""
    rule, (keys, values) = rule_of(shape), heads_of(shape)
    of_keys, of_values = keys * rule.key_dim, values * rule.value_dim
    return {
        "rule's queries": of_keys,
        "rule's keys": of_keys,
        "rule's values": of_values,
        "rule's gates": of_values,
        "rates": values,
        "decays": values,
        "delta rule's values": of_values,
    }


def forward_bytes(shape: RankShape) -> int:
    """Bytes that a forward takes beside what it saves."""
    if kernels.take(shape):
        within = kernels.forward_bytes(shape)
    else:
        within = FP32 * int(MOST.elements(shape))
    return max(within, exchange_bytes(shape, heads(shape)))


def backward_bytes(shape: RankShape) -> int:
    """Bytes that the backward takes beyond what its forward saved."""
    if kernels.take(shape):
        return kernels.backward_bytes(shape)
    return FP32 * int(MOST_BACK.elements(shape))
