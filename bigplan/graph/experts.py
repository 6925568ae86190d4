"""A block's experts on one rank: how tokens reach them and come back, and what that takes.

Counted on the runtime's functions (runtime/experts/dispatch.py, runtime/experts/routed_rows.py),
which pass over all scores by torch's operators, and over rows, a row being a token's copy for one
of its experts, by generated kernels or torch's operators.

Other tools are priced as Megatron Core (`RankShape.dispatched`; its token_dispatcher.py and
experts.py): a fused kernel copies tokens into rows, rows go to the ranks of their experts and are
sorted there by expert, gate and up are one grouped product, and rows come back the same way.
"""

from __future__ import annotations

from bigplan.graph import spread
from bigplan.graph.graph import Tensor
from bigplan.graph.operators import Collective, Gemm, Stream
from bigplan.graph.shape import RankShape, grouped_kernels
from bigplan.spec.step import LayerStep, StepOp

# Bytes a score, and kernels. Forward: scores in fp32, their softmax, the k largest of them; then
# rows are sorted by expert. Backward: the softmax again, and its derivative; the balance's part.
ROUTED_BYTES, ROUTED_LAUNCHES = 18, 24
ROUTED_BACK_BYTES, ROUTED_BACK_LAUNCHES = 76, 28
# Tensors of gate's size that are read and written, and kernels. The forward is silu(gate), times
# up, times a weight; the backward computes it again, beside the gradients of all three.
WEIGHTED_PASSES, WEIGHTED_LAUNCHES = 3, 1  # by a kernel
WEIGHTED_BACK_PASSES, WEIGHTED_BACK_LAUNCHES = 6, 1
EAGER_WEIGHTED, EAGER_WEIGHTED_LAUNCHES = 7, 3  # by torch's operators, one after the other
EAGER_WEIGHTED_BACK, EAGER_WEIGHTED_BACK_LAUNCHES = 24, 10
# Other activations likewise (runtime/experts/activations.py): clamped, of GPT-OSS.
EAGER_CLAMPED, EAGER_CLAMPED_LAUNCHES = 18, 8
EAGER_CLAMPED_BACK, EAGER_CLAMPED_BACK_LAUNCHES = 56, 26
# The squared relu of experts without a gate.
EAGER_SQUARED, EAGER_SQUARED_LAUNCHES = 6, 3
EAGER_SQUARED_BACK, EAGER_SQUARED_BACK_LAUNCHES = 17, 8
# Where weights weigh what experts read.
EAGER_WEIGHED, EAGER_WEIGHED_LAUNCHES = 9, 5
EAGER_WEIGHED_BACK, EAGER_WEIGHED_BACK_LAUNCHES = 30, 13
DISPATCHED_BACK_PASSES = 5  # Megatron Core keeps the activation that the native backward writes
# A bias, and groups: bytes a score and kernels beyond these.
BIASED_BYTES, BIASED_LAUNCHES = 8, 4
IN_GROUPS_BYTES, IN_GROUPS_LAUNCHES = 12, 8
# Bytes a score and kernels of SparseMixer for each expert of a token, beyond these: a softmax over
# some experts, and its derivative (runtime/experts/sparsemixer.py).
IN_TURN_BYTES, IN_TURN_LAUNCHES = 70, 11
IN_TURN_BACK_BYTES, IN_TURN_BACK_LAUNCHES = 94, 16
# Of trained numbers of experts (runtime/experts/expert_scales.py), backward.
SCALED_BACK_BYTES, SCALED_BACK_LAUNCHES = 12, 6
SENT = "sent"  # the stream that copies tokens for experts
PLACES_LAUNCHES = 4  # the numbers that say where a row comes from, or goes to


def row_bytes(shape: RankShape) -> int:
    """Bytes of the rows that experts read, or give: a hidden state for each expert of a token."""
    return shape.model.experts_per_token * spread.routed_hidden(shape)


def inner_bytes(shape: RankShape) -> int:
    """Bytes of all rows' gate, up or inner values on a tensor-parallel rank."""
    activations = shape.steps(StepOp.ACTIVATION)[-1:]  # after that of an MLP beside the experts
    return sum(shape.activation_shape.nbytes(step.gives[0]) for step in activations)


def _entering(shape: RankShape) -> int:
    """Values that experts' first products give: gate and up, or up alone."""
    return 1 + shape.model.gated


def grouped_product(shape: RankShape, step: LayerStep, *, fp8: bool = False) -> Gemm:
    """The products of all rows with their experts' matrices, one launch for each value given."""
    (read,), given = step.reads, step.gives[0]
    if shape.dispatched:
        rows, widths = shape.routed * read.each, [value.parts for value in step.gives]
        return Gemm(
            step.name, rows, sum(widths), read.parts, fp8=fp8, groups=shape.experts, apart=True
        )
    return Gemm(
        step.name,
        shape.tokens * read.each,
        given.columns(shape.tp) // given.each,
        read.columns(shape.tp) // read.each,
        fp8=fp8,
        count=len(step.gives),
        groups=shape.experts,
        apart=not grouped_kernels(shape),
        scaled_rows=fp8 and grouped_kernels(shape),
    )


def routing(shape: RankShape) -> tuple[tuple[Stream, Stream], ...]:
    """Choosing experts and copying tokens for them, forward and backward.

    The backward adds up the gradients by rows and brings them back to their tokens. It also copies
    the rows again, because the forward keeps none.
    """
    rows, scores, made = row_bytes(shape), shape.routed * shape.model.experts, shape.generated
    chosen, chosen_back = _choosing(shape)
    # Autograd adds up the gradients by what the router and the matrix before experts read.
    again = 3 * shape.hidden if shape.model.expert_latent else 0
    hidden = spread.routed_hidden(shape)
    # Tokens in 8 bits are copied at half the bytes (runtime/experts/grouped_eight_bits.py).
    copied = rows if shape.training.fp8_gemms else 2 * rows
    both = shape.model.gated
    there, back = copied, _summed(shape, hidden, both=both) + 2 * rows
    if shape.spreads_experts:  # tokens are copied for ranks and added up by them besides
        came = spread.came_bytes(shape)
        there, back = there + 2 * came, _summed(shape, came, both=both) + 2 * rows + came + hidden
    if shape.dispatched:
        there = back = _brought(shape)
    return (
        (
            Stream("route", chosen[0] * scores, chosen[1]),
            Stream("route", chosen_back[0] * scores + again, chosen_back[1] + (again > 0)),
        ),
        (
            Stream(SENT, there, PLACES_LAUNCHES, generated=made),
            Stream(SENT, back, 2 * PLACES_LAUNCHES, generated=made),
        ),
    )


def _choosing(shape: RankShape) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes a score, and kernels, of a token's choice, forward and backward."""
    routing = shape.model.routed_by
    nbytes, launches = ROUTED_BYTES, ROUTED_LAUNCHES
    back, back_launches = ROUTED_BACK_BYTES, ROUTED_BACK_LAUNCHES
    if routing.scores == "sparsemixer":
        each = shape.model.experts_per_token
        nbytes, launches = nbytes + each * IN_TURN_BYTES, launches + each * IN_TURN_LAUNCHES
        back += each * IN_TURN_BACK_BYTES
        back_launches += each * IN_TURN_BACK_LAUNCHES
    if routing.expert_scales:
        back, back_launches = back + SCALED_BACK_BYTES, back_launches + SCALED_BACK_LAUNCHES
    if routing.bias:
        nbytes, launches = nbytes + BIASED_BYTES, launches + BIASED_LAUNCHES
    if routing.groups > 1:
        nbytes, launches = nbytes + IN_GROUPS_BYTES, launches + IN_GROUPS_LAUNCHES
    return (nbytes, launches), (back, back_launches)


def combining(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream]:
    """Adding up the rows of a token, and copying the gradient of their sum to all of them."""
    hidden, copied, made = spread.routed_hidden(shape), 2 * row_bytes(shape), shape.generated
    summed = _summed(shape, hidden)
    if shape.spreads_experts:
        came = spread.came_bytes(shape)
        summed, copied = _summed(shape, came) + came + hidden, copied + 2 * came
    if shape.dispatched:
        summed = copied = _brought(shape)
    return (
        Stream(step.name, summed, PLACES_LAUNCHES, generated=made),
        Stream(step.name, copied, PLACES_LAUNCHES, generated=made),
    )


def _brought(shape: RankShape) -> int:
    """Bytes of copying tokens into rows in the order of experts, or of adding up rows by token.

    Tokens that go once to each rank become rows where they come. By all-to-all rows are made before
    they are sent, and those that come from several ranks are sorted. In 8 bits rows are padded to
    whole blocks of scales besides (`Fp8Padding`); HybridEP pads as it copies. Megatron-LM's
    baselines of a layer of 470 MB of rows on 8 H100s tell that apart: in place of 16 bits, 8 cost
    0.74 and 0.76 ms more by all-to-all than by HybridEP, forward and backward, and 0.60 and 0.65
    by DeepEP, where this is 0.64 (tests/functional_tests/test_cases/common/moe_perf/baseline.json,
    d98e8a6).
    """
    rows, several = row_bytes(shape), shape.strategy.ep > 1
    once = shape.sends_once and several
    padded = 2 * rows if shape.training.fp8_gemms and (shape.pads_rows or not once) else 0
    if once:
        return spread.came_bytes(shape) + rows + padded
    ordered = 2 * rows if several and shape.experts > 1 else 0
    return rows + spread.routed_hidden(shape) + ordered + padded


def exchanged(shape: RankShape) -> tuple[Collective, ...]:
    """Rows on their way to the ranks of their experts, and back; the backward does the same.

    Experts are equally busy, so that as many rows come to a rank as it sends.
    """
    if shape.spreads_experts:
        return (*spread.brought(shape), *spread.returned(shape))
    if not shape.dispatched or shape.strategy.ep == 1:
        return ()
    rows, each, routing = row_bytes(shape), shape.model.experts_per_token, shape.model.routed_by
    groups = routing.groups, routing.groups_per_token
    names = (SENT, "returned")
    return tuple(
        Collective(f"rows {name}", "all_to_all", rows, rows=each, groups=groups) for name in names
    )


def brought_again(shape: RankShape) -> tuple[Collective, ...]:
    """What comes again before the products of rows run again."""
    return spread.brought(shape) if shape.spreads_experts else exchanged(shape)[:1]


def kept_rows(shape: RankShape) -> int:
    """Bytes kept for the backward of what came from other ranks, where others have any experts.

    The native backward copies rows again, out of tokens.
    """
    if shape.spreads_experts:
        # Last biases are weighted where tokens are, first ones where their rows are.
        each = shape.model.experts_per_token if shape.model.mlp_bias else 0
        return spread.came_bytes(shape) + spread.places_bytes(shape) + 4 * shape.tokens * each
    return row_bytes(shape) if shape.dispatched else 0


# Rows beyond an equal share for which a rank has room. Tokens choose unevenly, by how much nobody
# knows before. Switch Transformers train with room for a quarter more in each expert (a capacity
# factor of 1.25; Fedus et al. 2021, arXiv 2101.03961). A rank's experts are more even than one.
UNEVEN = 0.25


def arriving_bytes(shape: RankShape) -> int:
    """Bytes that a pass has besides, where ranks send each other tokens.

    These are the tokens that come, and what experts give of them; and room for more rows than an
    equal share, of which a pass has what products read and give, gate, up and inner values.
    """
    if not shape.spreads_experts:
        return 0
    came = 2 * spread.came_bytes(shape)
    inner = (_entering(shape) + 1) * inner_bytes(shape)
    return came + int(UNEVEN * (came + 2 * row_bytes(shape) + inner))


def uneven_bytes(shape: RankShape) -> int:
    """Bytes that a block may keep of more rows than an equal share: tokens that came, gate, up."""
    if not shape.spreads_experts:
        return 0
    return int(UNEVEN * (spread.came_bytes(shape) + _entering(shape) * inner_bytes(shape)))


def _summed(shape: RankShape, tokens: int, *, both: bool = False) -> int:
    """Bytes of adding up rows as so many bytes of tokens; `both`: rows of two values.

    Torch's operators add the two first, and copy rows into the order of tokens before they are
    added up.
    """
    rows = row_bytes(shape)
    if shape.generated:
        return (1 + both) * rows + tokens
    return 3 * both * rows + 3 * rows + tokens


def weighting(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream]:
    """The gated activation of every row, or of every token by a shared MLP, times its weight."""
    forward = EAGER_WEIGHTED, EAGER_WEIGHTED_LAUNCHES
    backward = EAGER_WEIGHTED_BACK, EAGER_WEIGHTED_BACK_LAUNCHES
    if shape.model.mlp == "clamped_swiglu":
        forward = EAGER_CLAMPED, EAGER_CLAMPED_LAUNCHES
        backward = EAGER_CLAMPED_BACK, EAGER_CLAMPED_BACK_LAUNCHES
    if shape.model.mlp == "relu2":
        forward = EAGER_SQUARED, EAGER_SQUARED_LAUNCHES
        backward = EAGER_SQUARED_BACK, EAGER_SQUARED_BACK_LAUNCHES
    if _weighs_inputs(shape):
        forward = EAGER_WEIGHED, EAGER_WEIGHED_LAUNCHES
        backward = EAGER_WEIGHED_BACK, EAGER_WEIGHED_BACK_LAUNCHES
    made = shape.generated
    if shape.dispatched:
        forward = WEIGHTED_PASSES, WEIGHTED_LAUNCHES
        backward = DISPATCHED_BACK_PASSES, WEIGHTED_BACK_LAUNCHES
    elif made:  # without a gate there is that to read less, and its gradient to write
        without = not shape.model.gated
        forward = WEIGHTED_PASSES - without, WEIGHTED_LAUNCHES
        backward = WEIGHTED_BACK_PASSES - 2 * without, WEIGHTED_BACK_LAUNCHES
    inner = shape.activation_shape.nbytes(step.gives[0])
    return (
        Stream(step.name, forward[0] * inner, forward[1], generated=made),
        Stream(step.name, backward[0] * inner, backward[1], generated=made),
    )


def _weighs_inputs(shape: RankShape) -> bool:
    return shape.model.routed_by.weighs == "inputs"


def gradient_bytes(shape: RankShape, tensors: tuple[Tensor, ...]) -> int:
    """Bytes of experts' gradients that live at once, before they are added to their sums.

    A grouped product makes those of one projection at once, in the compute dtype; products of
    single experts add to the sums themselves. Where autograd makes them, all live.
    """
    made = [tensor.elements for tensor in tensors if tensor.experts]
    if shape.dispatched:
        return shape.element * max(made, default=0)
    if not shape.sums_in_products:
        return shape.element * sum(made)
    return shape.element * max(made, default=0) if grouped_kernels(shape) else 0


def largest_bytes(shape: RankShape, tensors: tuple[Tensor, ...]) -> int:
    """Bytes of the largest tensor that a pass through the MLP makes, with experts or without."""
    made = (tensor.elements for tensor in tensors if tensor.experts and grouped_kernels(shape))
    return max(row_bytes(shape), inner_bytes(shape), shape.element * max(made, default=0))


def backward_workspace(shape: RankShape, tensors: tuple[Tensor, ...]) -> int:
    """Bytes that the backward of experts needs beyond what is saved, their activation among it.

    Within the activation, the gradients by it, by gate and by up live beside those of the rows; the
    activation itself is computed over the first. Torch's operators need two tensors more, of a
    clamped activation five, and two for weighed inputs. Then comes a projection's gradient; at the
    end rows are added up by token. Without a gate there is one gradient and one set of rows less.
    A norm of what experts give makes a gradient beside the residual stream's, as what the MLP
    beside them has where each has a norm, and what the router reads where experts read a latent.
    """
    rows, inner, made = row_bytes(shape), inner_bytes(shape), gradient_bytes(shape, tensors)
    entering, eager = _entering(shape), 7 if shape.model.mlp == "clamped_swiglu" else 4
    eager += 2 * _weighs_inputs(shape)
    by_kernel = shape.generated or shape.dispatched
    within = rows + (entering if by_kernel else eager) * inner
    projection = rows + entering * inner + made + spread.routed_hidden(shape)
    adding = entering * (inner + rows) + spread.routed_hidden(shape)
    beside = shape.hidden if shape.model.closes("mlp") else 0
    beside += shape.whole_hidden if shape.model.routes_apart else 0
    return max(within, projection, adding) + shape.gathered + beside
