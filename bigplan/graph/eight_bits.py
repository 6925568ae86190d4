"""Products in 8 bits: the casts beside them, and the memory that these take."""

from __future__ import annotations

from bigplan.graph import spread
from bigplan.graph.experts import UNEVEN
from bigplan.graph.operators import Gemm, Stream
from bigplan.graph.shape import RankShape
from bigplan.spec.step import LayerStep, StepOp

# Bytes that plain torch moves for a cast, as a multiple of the kernels' 5 or 6: fp32 values are
# made, multiplied and cast on the way, and transposed then (runtime/linear/eight_bits.py), 23
# bytes.
EAGER_CAST = 4.0
# The same of experts' casts, whose kernels move 3 and 5 (runtime/experts/grouped_eight_bits.py): 27
# of rows and of matrices, 50 of rows that are transposed.
EAGER_EXPERT_CAST = 9.0
LAUNCHES = 3  # of a cast: its largest value is set to zero, looked for and used


def name_of_cast(product: str) -> str:
    """The operator that casts a product's factors."""
    return f"{product} to fp8"


def casts(shape: RankShape, product: Gemm, step: LayerStep) -> tuple[Stream, Stream]:
    """What casts a product's operands, forward and backward.

    Tools cast inputs and weights in the forward, and an output's gradient in the backward. Each
    cast writes the transpose, too: 2 bytes are read and 1 + 1 written. With Transformer Engine's
    current scaling they look for the largest value first, which reads the tensor once more and
    makes three kernels of one.

    The native runtime first reads a tensor for its largest value (2 bytes), then casts it (2 read,
    1 written for each form). Its forward casts inputs and weights. Its backward casts their
    transposes, and both forms of the output's gradient. It makes weights' gradients in 16 bits, and
    reads these once more where products would have added them to their sums. Each of its kernels
    needs all of the one before. In a block 1,024 wide that is 94 starts, 0.14 ms of 2.8, and the
    weights of a product take less than a start to read.
    """
    name = name_of_cast(product.name)
    inputs, outputs = product.m * product.k, product.m * product.n
    weights = product.n * product.k * product.groups
    if shape.cast_once or not shape.fused:
        each, kernels = (6, LAUNCHES) if shape.looks_first else (4, 1)
        ahead = Stream(name, each * (inputs + weights), 2 * kernels * product.launches)
        return ahead, Stream(name, each * outputs, kernels * product.launches)
    if product.groups > 1:
        return _casts_of_experts(shape, product, enters=step.gives[0].split)
    count, made = len(step.gives), shape.generated
    moved, apart = 5 * (inputs + weights), shape.sums_in_products
    back = moved + 6 * outputs + (shape.element * weights if apart else 0)
    launches = LAUNCHES * (1 + count), LAUNCHES * (1 + 2 * count) + (count if apart else 0)
    return (
        Stream(name, moved, launches[0], EAGER_CAST, made, in_turn=True),
        Stream(name, back, launches[1], EAGER_CAST, made, in_turn=True),
    )


BY_ROW, BY_COLUMN = 3, 5  # bytes an element: a kernel reads rows once, columns twice
# The same of experts' rows by column, at 0.76 of the rate of other casts (0.53 to 0.77 of six):
# experts have any number of rows, one program each for 64 columns of them. Measured on an H200
# (benchmarks/results/2026-11-27-h200-experts-fp8/products.txt).
ROWS_BY_COLUMN = 6.6
BEHIND = 16  # bytes behind a row in 8 bits, its scale among them
ENDS_LAUNCHES = 7  # of where experts' transposed rows begin


def _casts_of_experts(shape: RankShape, product: Gemm, *, enters: bool) -> tuple[Stream, Stream]:
    """The same of experts' products, whose rows and columns have scales of their own.

    The forward casts tokens, before they are copied to rows, and then what leads back. The backward
    casts each gradient's rows, and for matrices' gradients all rows transposed. A matrix that leads
    from the hidden size is cast as it lies in the forward (`enters`), and transposed in the
    backward; one that leads back, the other way round. Sums of gradients are priced apart
    (`gradient_sum`).
    """
    name, count, made = name_of_cast(product.name), product.count, shape.generated
    inputs, outputs = product.m * product.k, product.m * product.n * count
    weights = product.n * product.k * product.groups * count
    ahead, behind = (BY_ROW, BY_COLUMN) if enters else (BY_COLUMN, BY_ROW)
    read = _tokens_read(shape) if enters else inputs
    back = behind * weights + BY_ROW * outputs + ROWS_BY_COLUMN * (outputs + inputs)
    pairs = (
        (BY_ROW * read + ahead * weights, 1 + count),
        (back, 1 + 3 * count + ENDS_LAUNCHES),
    )
    forward, backward = (
        Stream(name, nbytes, launches, EAGER_EXPERT_CAST, made, in_turn=True)
        for nbytes, launches in pairs
    )
    return forward, backward


def cast_bytes(shape: RankShape) -> tuple[int, int]:
    """Bytes of the native runtime's casts, forward and backward, beside what a product is made of.

    The forward holds an input and one weight. The backward holds the transposed gradients of all
    outputs of a step, one of them as it is, an input, and a weight's gradient in 16 bits before it
    is added. In plain torch casts pass through fp32.
    """
    if shape.cast_once or not (shape.training.fp8_gemms and shape.fused):
        return 0, 0
    forward = backward = 0
    for step in shape.steps(StepOp.PRODUCT):
        widths = [value.columns(shape.tp) for value in step.gives]
        inner, widest = step.reads[0].columns(shape.tp), max(widths)
        if any(parameter.experts for parameter in step.parameters):
            ahead, behind = _cast_bytes_of_experts(shape, inner, widest)
            forward, backward = max(forward, ahead), max(backward, behind)
            continue
        read, matrix = shape.tokens * inner, widest * inner
        through = 0 if shape.generated else 8 * max(read, matrix, shape.tokens * widest)
        forward = max(forward, read + matrix + through)
        given = shape.tokens * (sum(widths) + widest)
        backward = max(backward, given + read + shape.element * matrix + through)
    return forward, backward


def _tokens_read(shape: RankShape) -> int:
    """Elements of the tokens that a rank's experts get."""
    whole = shape.read_by_experts
    return (spread.came_bytes(shape) if shape.spreads_experts else whole) // shape.element


def _cast_bytes_of_experts(shape: RankShape, inner: int, outer: int) -> tuple[int, int]:
    """The same of a product of experts, for values of so many elements a token, in and out.

    The forward holds rows and a matrix of all experts; so does the backward with a gradient's rows,
    and then the transposes of both rows. Rows have `BEHIND` bytes more, and may be more than an
    equal share; tokens are cast before. In plain torch a cast makes two tensors in fp32.
    """
    each = shape.model.experts_per_token
    matrix = inner * outer // each**2 * shape.experts
    more = 1.0 + (UNEVEN if shape.spreads_experts else 0.0)
    rows, given = (int(more * shape.tokens * (one + BEHIND * each)) for one in (inner, outer))
    through = 0 if shape.generated else 8 * max(rows, given, matrix)
    return rows + rows // each + matrix + through, max(given + matrix, given + rows) + through
