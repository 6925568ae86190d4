"""The core of attention on one rank: its operators forward and backward, and what they take."""

from __future__ import annotations

from dataclasses import replace

from bigplan.graph import attention_kernels, wide_heads
from bigplan.graph.exchanged_heads import Columns
from bigplan.graph.operators import (
    Attention,
    Gemm,
    Operator,
    Stream,
    by_input_and_weight,
    doubled_reach,
)
from bigplan.graph.shape import RankShape
from bigplan.mechanics import ALIBI_COLUMNS, CAPPED_BLOCK
from bigplan.spec.gpu import FlashKernel

# A softmax of scores as a chain of kernels, in passes over the square of scores. Forward, the mask
# is filled in and the softmax runs: four passes, each a read or a write. Backward, the softmax
# reads two squares and writes one, and the mask's backward reads and writes: five. A fused causal
# kernel makes one and a half, and two.
EAGER_SOFTMAX = (4 / 1.5, 5 / 2)
# FlashAttention-2 computes whole groups of 32 columns of a head up to 128, and of 64 beyond (its
# flash_api.cpp rounds head sizes up). So heads of 128, with eight more columns for linear biases,
# cost as much as heads of 192, and torch 2.11 takes the kernel of 192 for them
# (benchmarks/results/2026-11-25-h100-alibi).
FLASH_COLUMNS, FLASH_NARROW, FLASH_WIDE_COLUMNS = 32, 128, 64
# Times the bytes that copies to heads with more columns take: rows of 272 bytes are copied at a
# third of the usual rate, 1.66 GB in 1.64 ms on an H100 in the same run.
WIDENED_COPIES = 3.0
FLASH_ROWS = 128  # its sums have whole groups of so many rows
# Edges of documents that are kept apart, forward and backward, each half of a tile of 128 keys for
# every query: counted on kernels/handwritten/attention.py's tiles of 64 x 64, and of 128 x 64 and
# 64 x 128. A document begins and ends anywhere within a tile. So its queries meet half a tile of
# keys that come after them and half a tile that lies before their document, and half a tile of
# other queries meets the document before. Rows of tiles have three loops in place of two, because
# tiles are masked both before and behind those that need no mask. Each loop is filled and drained.
DOCUMENT_EDGES, DOCUMENT_FILLS = (1.5, 2.5), 3 / 2
LEAST_COLUMNS = 16  # those of Triton's products are powers of two, 16 at least
EFFICIENT_COLUMNS = 64  # and those of torch's memory-efficient kernel of so many columns
# Counted on runtime/attention/sinks.py: reads and writes of attention's result, and plain torch's
# kernels; the kernel that counts sinks in one pass is one for five.
SINK_PASSES, SINK_LAUNCHES = (2, 4), (5, 7)

Passes = tuple[tuple[Operator, ...], tuple[Operator, ...]]  # operators forward and backward
Reach = tuple[int, int | None]  # tokens of a sequence, or of a chunk, and the window within


def attention(shape: RankShape) -> Passes:
    """Scores, softmax and weighted values: flash kernels, or products and a softmax kernel.

    Blocks that see different numbers of tokens have operators of their own, each with the mean over
    all blocks of what it computes and moves.
    """
    if shape.training.attention != "flash":
        return _materialised(shape)
    length, parts = attention_kernels.attended_length(shape), dict[Reach, float]()
    for one, part in shape.model.attention_shares.items():
        seen = one.within(length)
        parts[seen] = parts.get(seen, 0.0) + part
    forward: list[Operator] = []
    backward: list[Operator] = []
    for seen, part in parts.items():
        if attention_kernels.by_products(shape):
            wide, wide_back = wide_heads.attention(shape, seen, part)
            forward += wide
            backward += wide_back
            continue
        kernel = _flash(shape, seen, part)
        named = "" if len(parts) == 1 else "global " if seen == (length, None) else "local "
        kernel = replace(kernel, name=f"{named}attention", launches=int(not forward))
        flops = products_again(shape) * kernel.flops
        again = replace(kernel, flops=flops, nbytes=2 * kernel.nbytes, backward=True)
        if attention_kernels.isolates_in_kernel(shape):
            again = replace(again, edges=DOCUMENT_EDGES[1])
        more = _in_blocks(shape, seen, part) if attention_kernels.in_blocks(shape) else ((), ())
        forward += [kernel, *more[0]]
        backward += [again, *more[1]]
    widened, widened_back = _padded(shape)
    if attention_kernels.linear_biases(shape) and shape.fused:
        widened, widened_back = _linear_biases(shape)
    sinks, sinks_back = _sinks(shape)
    return (*forward, *widened, *sinks), (*backward, *widened_back, *sinks_back)


def _sinks(shape: RankShape) -> Passes:
    """What counts sinks in the results of all heads (runtime/attention/sinks.py).

    The forward scales the result in place. The backward multiplies it with its gradient, a tensor
    that is then added up, unless sinks are frozen. Sums of softmax are small beside a head's
    columns.
    """
    if not shape.model.attention_sinks:
        return (), ()
    result = shape.mixed_tokens * shape.heads * shape.model.value_width * shape.element
    ahead, back = SINK_PASSES
    launches, launches_back = SINK_LAUNCHES
    counted = (Stream("sinks", ahead * result, launches),)
    return counted, () if shape.frozen else (Stream("sinks", back * result, launches_back),)


def _flash(shape: RankShape, seen: Reach, part: float) -> Attention:
    """The forward of the blocks with these chunks and this window, which are this part of all.

    Query x key and probability x value take two FLOPs a column over the lower triangle, or what a
    window leaves of it. The backward recomputes the scores: five products for the forward's two.
    """
    tokens, heads, keys = shape.mixed_tokens, shape.heads, shape.model.head_dim
    (length, window), values = seen, computed_columns(shape)
    moved = 1.0 * tokens * (heads + shape.kv_heads) * (keys + values) * shape.element
    padded = shape.fused and attention_kernels.pads_values(shape)
    bound: FlashKernel | None = "flash2" if padded else None
    if attention_kernels.is_generated(shape):
        keys, bound = max(LEAST_COLUMNS, 1 << (keys - 1).bit_length()), "alibi"
        values = keys
    elif attention_kernels.linear_biases(shape) and shape.fused:
        keys, bound = _flash_columns(keys + ALIBI_COLUMNS), "flash2"
        values = keys
    flops = 1.0 * tokens * doubled_reach(length, window) * heads * (keys + values)
    kernel = Attention("attention", part * flops, part * moved, False, keys, length, bound, window)
    if not attention_kernels.isolates_in_kernel(shape):
        return kernel
    return replace(kernel, edges=DOCUMENT_EDGES[0], fills=DOCUMENT_FILLS)


def computed_columns(shape: RankShape) -> int:
    """Columns of a head's values within attention, padded or not."""
    return shape.model.head_dim if attention_kernels.pads_values(shape) else shape.model.value_width


def _padded(shape: RankShape) -> Passes:
    """Copies of values and of the result with more columns or fewer.

    See runtime/attention/narrow_values.py.     The backward pads values, the result and the
    gradient by it, and cuts the gradient by values.
    """
    if not attention_kernels.pads_values(shape):
        return (), ()
    both = shape.model.head_dim + shape.model.value_width
    moved = shape.mixed_tokens * shape.heads * both * shape.element
    name = "padded values"
    return (Stream(name, 2 * moved, launches=2),), (Stream(name, 4 * moved, launches=4),)


def products_again(shape: RankShape) -> float:
    """FLOPs of the backward over the forward's: 2.5 where values are as wide as keys.

    Scores and gradients by queries and keys are as wide as keys. Gradients by probabilities and by
    values are as wide as values.
    """
    keys, values = shape.model.head_dim, computed_columns(shape)
    return (3 * keys + 2 * values) / (keys + values)


def _in_blocks(shape: RankShape, reach: Reach, part: float) -> Passes:
    """What plain torch moves beside the products to cap or hide scores.

    See runtime/attention/in_blocks.py. Each score is fp32 but for the products' own results. The
    forward reads and writes it about 12 times, and the backward 24 times. Blocks of queries see
    half a block more than a query does.
    """
    seen = doubled_reach(*reach) / 2 + CAPPED_BLOCK / 2
    scores = 4.0 * shape.mixed_tokens * shape.heads * seen
    blocks = -(-shape.training.sequence_length // CAPPED_BLOCK)
    ahead, back = CAPPED_PASSES
    launches = round(part * CAPPED_LAUNCHES * blocks)
    return (
        (Stream("capped scores", part * ahead * scores, launches),),
        (Stream("capped scores", part * back * scores, 2 * launches),),
    )


def _materialised(shape: RankShape) -> Passes:
    model, training = shape.model, shape.training
    heads, length, width = shape.heads, training.sequence_length, model.head_dim
    batch = shape.strategy.micro_batch * heads
    scores = batch * length * length * shape.element
    score = Gemm("scores", length, length, width, batch)
    weighted = Gemm("weighted values", length, model.value_width, length, batch)
    dropped: tuple[Stream, ...] = ()
    if training.dropout:
        dropped = (Stream("scores dropout", batch * length * length * (2 * shape.element + 1)),)
    # A fused causal softmax reads the lower triangle and writes the whole square.
    forward, backward = EAGER_SOFTMAX
    return (
        (score, Stream("softmax", 1.5 * scores, 1, forward), *dropped, weighted),
        (
            *by_input_and_weight((score, weighted)),
            Stream("softmax", 2 * scores, 1, backward),
            *dropped,
        ),
    )


# Counted on runtime/attention/in_blocks.py: reads and writes of scores, forward and backward, and
# kernels of a block of queries forward.
CAPPED_PASSES, CAPPED_LAUNCHES = (12, 24), 14


def _flash_columns(width: int) -> int:
    """Columns that FlashAttention-2 computes for heads of `width`."""
    group = FLASH_COLUMNS if width <= FLASH_NARROW else FLASH_WIDE_COLUMNS
    return -(-width // group) * group


def _linear_biases(shape: RankShape) -> tuple[tuple[Stream, ...], tuple[Stream, ...]]:
    """Copies of heads with more columns (runtime/attention/alibi.py), read and written, and back.

    The forward copies queries, keys, values and the result. The backward copies these and their
    gradients.
    """
    moved = WIDENED_COPIES * 2 * widened_bytes(shape)
    if not moved:
        return (), ()
    name = "linear biases"
    return (Stream(name, moved / 2, launches=4),), (Stream(name, moved, launches=8),)


def widened_bytes(shape: RankShape) -> int:
    """Bytes of these copies in a backward; a forward has half of them."""
    model = shape.model
    if not attention_kernels.linear_biases(shape) or attention_kernels.biases_in_kernel(shape):
        return 0
    each = shape.heads + (shape.heads if shape.activation_shape.expanded_kv else shape.kv_heads)
    return 4 * each * (model.head_dim + ALIBI_COLUMNS) * shape.mixed_tokens * shape.element


def flash_gradients(shape: RankShape) -> int:
    """Bytes that flash attention's backward takes beyond what its forward saved.

    These are the gradients of its result and by queries, keys and values, and fp32 sums. In 16 bits
    the sums are those of gradients by queries, and a number for each row of scores. If attention
    must give the same bits every time, it has several of the former: as many as fill the GPU with
    sequences' heads. For grouped heads it writes gradients by keys and values for every head of
    queries, before it adds them up (mha_bwd in flash_api.cpp of FlashAttention-2 and of torch 2.11;
    cuDNN takes as much or less). The kernel of linear biases has none of this but the number for
    each row. In fp32 torch's memory-efficient kernel has sums as large as the
    queries. Measured on an H100 (benchmarks/results/2026-11-25-h100-memory).
    """
    model, element = shape.model, shape.element
    if shape.training.attention != "flash":
        return 0
    heads, key_values, tokens = shape.heads, shape.kv_heads, shape.mixed_tokens
    if shape.activation_shape.expanded_kv:
        key_values = heads
    gradients = (heads + key_values) * (model.head_dim + model.value_width) * element
    if attention_kernels.is_generated(shape):
        return tokens * (gradients + 4 * heads)
    if attention_kernels.by_products(shape):
        return tokens * gradients + wide_heads.buffers(shape)
    if attention_kernels.in_blocks(shape):
        # Three fp32 copies of the scores of some queries, two in 16 bits, and fp32 sums.
        block = shape.strategy.micro_batch * heads * CAPPED_BLOCK * tokens
        sums = 2 * 4 * key_values * model.head_dim
        return (
            tokens * (gradients + sums) + block * (12 + 2 * element) // shape.strategy.micro_batch
        )
    if element == 4:
        columns = -(-model.head_dim // EFFICIENT_COLUMNS) * EFFICIENT_COLUMNS
        return tokens * (gradients + 4 * heads * (columns + 2))
    if key_values < heads:
        gradients += 2 * heads * model.head_dim * element
    columns = _flash_columns(model.head_dim)
    fill = -(-shape.multiprocessors // (heads * shape.strategy.micro_batch))
    sums = fill if shape.training.deterministic else 1
    length = tokens // shape.strategy.micro_batch
    rows = tokens // length * -(-length // FLASH_ROWS) * FLASH_ROWS
    return tokens * gradients + rows * 4 * heads * (sums * columns + 1)


def heads(shape: RankShape) -> Columns:
    """Columns of heads that context-parallel ranks exchange."""
    keys, values = shape.model.head_dim, shape.model.value_width
    return {
        "queries": shape.heads * keys,
        "keys": shape.kv_heads * keys,
        "values": shape.kv_heads * values,
        "attention's values": shape.heads * values,
    }
