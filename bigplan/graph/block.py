"""A transformer block on one rank: its operators forward and backward, and the bytes it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from bigplan.graph import expert_adapters, plain_adapters
from bigplan.graph.activation import activation, activation_bytes
from bigplan.graph.activations import block_saved_bytes, score_bytes
from bigplan.graph.adapters import adapter_products, dropped_bytes, local_adapters
from bigplan.graph.convolution import convolved
from bigplan.graph.eight_bits import cast_bytes, casts
from bigplan.graph.expert_biases import expert_biases, vector_bytes
from bigplan.graph.experts import (
    arriving_bytes,
    backward_workspace,
    combining,
    exchanged,
    grouped_product,
    inner_bytes,
    kept_rows,
    largest_bytes,
    routing,
    row_bytes,
    uneven_bytes,
    weighting,
)
from bigplan.graph.four_bits import unpacked_bytes, unpacking
from bigplan.graph.graph import LayerKind, Tensor
from bigplan.graph.latent import turned
from bigplan.graph.mixers import into_output, mixing, out_of_output
from bigplan.graph.operators import (
    ALIGNED,
    Collective,
    Gemm,
    Operator,
    Stream,
    by_input,
    by_input_and_weight,
)
from bigplan.graph.reruns import reruns
from bigplan.graph.shape import RankShape, gradient_sum, local_tensors, new_gradients
from bigplan.graph.shared import (
    added,
    gated_by_score,
    into_mlp,
    into_router,
    into_shared,
    out_of_mlp,
    shared_inner_bytes,
    shared_workspace,
)
from bigplan.graph.spread import counted
from bigplan.graph.wide_norms import wide_norms
from bigplan.spec.layers import ATTENTION_SUM, SHARED_ACTIVATION, SHARED_SUM, SHARED_UP
from bigplan.spec.step import LayerStep, StepOp

# Bytes that plain torch kernels move, as a multiple of a fused kernel's, counted on the native
# blocks (bf16). RMSNorm moves 40 and 94 bytes an element forward and backward instead of 4 and 6.
# Rotary embedding takes 10 passes instead of 2. Torch's layer norm takes 1.8 times as long as its
# bytes forward and 2.4 times backward: medians of widths from 768 to 16,384
# (benchmarks/results/2026-11-24-h200-generated, torch 2.11).
EAGER_NORM = {"rmsnorm": (10.0, 15.0), "layernorm": (1.8, 2.4)}
EAGER_ROTARY = 5.0
EAGER_RESIDUAL = 1.5
GATE_PASSES = 2 + 3, 3 + 3 + 3  # a sigmoid and a product, and their gradients
HEAD_GATE_PASSES = 2, 2 + 3 + 1  # the product, and two gradients of which one is summed
ROUTER = "router"  # the product that gives scores, which is never in fp8


def block(shape: RankShape) -> LayerKind:
    """One block: attention and MLP, each after a norm and added to the residual stream."""
    tensors, adapters = local_tensors(shape, "block"), local_adapters(shape)
    trained = adapters if shape.frozen else tensors
    activation_shape = shape.activation_shape
    saved = block_saved_bytes(shape.model, activation_shape) + kept_rows(shape)
    saved += plain_adapters.kept_bytes(shape)
    inner, inner_backward = mixing(shape).core(shape)
    streams = _streams(shape)
    forward = [pair[0] for pair in streams]
    linear, linear_backward = _linear(shape)
    awaited = [product for product in linear if isinstance(product, Gemm) and product.apart]
    exchanged_forward, exchanged_backward = _collectives(shape)
    return LayerKind(
        name="block",
        tensors=tensors,
        scaled=shape.scaled,
        forward=(*linear, *inner, *forward, *exchanged_forward),
        backward=(
            *linear_backward,
            *inner_backward,
            *(pair[1] for pair in streams),
            gradient_sum(shape, trained),
            *exchanged_backward,
        ),
        saved=saved,
        boundary=shape.hidden,
        reruns=reruns(shape, saved, linear, inner, forward),
        forward_workspace=_forward_workspace(shape),
        backward_workspace=_backward_workspace(shape, trained, saved) + _beside_backward(shape),
        chained=_chained(shape),
        largest=max(shape.whole_hidden, largest_bytes(shape, trained), shared_inner_bytes(shape)),
        frozen=shape.frozen,
        adapters=adapters,
        waits=bool(awaited),
        # Other tools wait before tokens are sent, and have no products to run meanwhile.
        in_turn=any(shape.dispatched or not product.long for product in awaited),
        whole_experts=(
            sum(t.elements for t in tensors if t.experts)
            if shape.dispatched or shape.spreads_experts
            else 0
        ),
        ep=shape.strategy.ep if shape.spreads_experts else 1,
        uneven=uneven_bytes(shape),
    )


def _collectives(shape: RankShape) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """What ranks exchange in a forward, and in a backward."""
    mixer = mixing(shape)
    forward = (
        *mixer.exchanges(shape),
        *mixer.into(shape, ""),
        *into_mlp(shape, "mlp input"),
        *into_router(shape, "mlp input"),
        *out_of_output(shape),
        *out_of_mlp(shape, "mlp output"),
        *counted(shape),
        *exchanged(shape),
        *wide_norms(shape),
    )
    # A sum over ranks of the input's gradient does not depend on the weight's gradient.
    backward = (
        *mixer.exchanges(shape),
        *mixer.out_of(shape),
        *out_of_mlp(shape, "mlp input", beside="mlp up by weight"),
        *into_output(shape),
        *into_mlp(shape, "mlp output"),
        *_gathered_again(shape),
        *exchanged(shape),
        *wide_norms(shape, back=True),
    )
    return forward, backward


def _forward_workspace(shape: RankShape) -> int:
    """Bytes that a forward needs beyond what is saved."""
    return (
        2 * max(shape.whole_hidden, row_bytes(shape))
        + arriving_bytes(shape)
        + mixing(shape).forward_bytes(shape)
        + vector_bytes(shape)
        + unpacked_bytes(shape)
        + dropped_bytes(shape)
        + cast_bytes(shape)[0]
        + expert_adapters.forward_bytes(shape)
        + (inner_bytes(shape) if shape.model.gate_scale != 1 else 0)  # the gate before its factor
        + activation_bytes(shape)
    )


def _beside_backward(shape: RankShape) -> int:
    """Bytes that a backward needs of what not every block has."""
    return (
        vector_bytes(shape)
        + arriving_bytes(shape)
        + unpacked_bytes(shape)
        + dropped_bytes(shape)
        + cast_bytes(shape)[1]
        + (shape.hidden if shape.model.block_scale else 0)  # the gradient by what is multiplied
        + activation_bytes(shape)
    )


def _linear(shape: RankShape) -> tuple[tuple[Operator, ...], tuple[Operator, ...]]:
    """The matrix products, those with one input as one kernel but for narrow ones; backward."""
    fp8, products = shape.training.fp8_gemms, shape.steps(StepOp.PRODUCT)
    whole = tuple(_product(shape, step, fp8=fp8) for step in products)
    biases = tuple(
        Stream(f"{gemm.name} bias", gemm.m * gemm.n * shape.element)
        for gemm, step in zip(whole, products, strict=True)
        if step.biased and gemm.groups == 1
    )
    each = (_narrow_apart(shape, *one) for one in zip(whole, products, strict=True))
    gemms = tuple(chain.from_iterable(each))
    biased = [expert_biases(shape, step) for step in products]
    more, more_back = (tuple(chain(*(pair[side] for pair in biased))) for side in (0, 1))
    if shape.frozen:
        forward, backward = adapter_products(shape, products)
        opened = unpacking(shape, products)
        return (*gemms, *more, *opened, *forward), (
            *by_input(gemms),
            *more_back,
            *opened,
            *backward,
        )
    pairs = [casts(shape, *one) for one in zip(whole, products, strict=True) if one[0].fp8]
    ahead, back = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return (*gemms, *more, *ahead), (*by_input_and_weight(gemms), *biases, *more_back, *back)


def _product(shape: RankShape, step: LayerStep, *, fp8: bool) -> Gemm:
    if any(parameter.experts for parameter in step.parameters):
        return grouped_product(shape, step, fp8=fp8)
    outputs = sum(value.columns(shape.tp) for value in step.gives)
    fp8 = fp8 and step.name != ROUTER
    tokens = shape.tokens_of(step)
    return Gemm(step.name, tokens, outputs, step.reads[0].columns(shape.tp), fp8=fp8)


def _narrow_apart(shape: RankShape, gemm: Gemm, step: LayerStep) -> tuple[Gemm, ...]:
    """A step's products: every matrix has one of its own, so one with odd rows slows no other.

    Such are the rates and decays of a delta rule with 30 heads, and a shared gate's single score.
    The others are priced as one.
    """
    columns = [value.columns(shape.tp) for value in step.gives]
    narrow = Counter(number for number in columns if number % ALIGNED)
    wide = gemm.n - sum(number * count for number, count in narrow.items())
    if gemm.groups > 1 or not narrow or not wide:
        return (gemm,)
    return (
        *(replace(gemm, n=number, count=count, fp8=False) for number, count in narrow.items()),
        replace(gemm, n=wide),
    )


def _chained(shape: RankShape) -> Mapping[StepOp, int]:
    """Bytes that chains of plain torch kernels keep and fused kernels do not.

    An RMSNorm casts its input to fp32, scales that and casts it back, before the weight: autograd
    keeps the fp32 copy and the scaled values in place of the input (`LlamaRMSNorm` of transformers,
    `RMSNorm` of torchtune). A gate's silu is a tensor of its own, kept beside what it is of.
    """
    size = shape.activation_shape
    normed = (step.reads[0] for step in shape.steps(StepOp.NORM))
    rms = shape.model.norm == "rmsnorm"
    gated = shape.model.gated
    gates = shape.steps(StepOp.ACTIVATION) if gated else ()
    return {
        StepOp.NORM: sum(size.nbytes(value, 4) for value in normed if rms or value.split),
        StepOp.ACTIVATION: sum(size.nbytes(step.gives[0]) for step in gates),
    }


def _streams(shape: RankShape) -> tuple[tuple[Stream, Stream], ...]:
    """Memory-bound operators, forward and backward."""
    found = []
    for step in shape.every_step("block"):
        match step.op:
            case StepOp.NORM:
                found.append(norm(shape, step))
            case StepOp.ROTARY:
                latent = shape.model.latent_attention
                found.append(turned(shape, step) if latent else (_rotary(shape, step),) * 2)
            case StepOp.ROUTE:
                found += routing(shape)
            case StepOp.COMBINE:
                found.append(combining(shape, step))
            case StepOp.CONVOLUTION:
                found.append(convolved(shape, step))
            case StepOp.GATE:
                moved = shape.activation_shape.nbytes(step.gives[0])
                by_head = shape.model.gate_of_heads
                passes = HEAD_GATE_PASSES if by_head else GATE_PASSES
                ahead, back = (number * moved for number in passes)
                found.append((Stream(step.name, ahead, 2), Stream(step.name, back, 3)))
            case StepOp.ACTIVATION:
                found.append(_activations(shape, step))
            case StepOp.SCALE:
                moved = 2 * shape.activation_shape.nbytes(step.gives[0])
                found.append((Stream(step.name, moved),) * 2)
            case StepOp.SUM if step.name in _added_first(shape):
                found.append(added(shape, step))
            case StepOp.SUM:
                found.append(_residual(shape, step))
    return tuple(found)


def _added_first(shape: RankShape) -> tuple[str, ...]:
    """Sums with one of two parts of a block that read the same value."""
    return (SHARED_SUM,) if shape.model.attention_beside is None else (ATTENTION_SUM,)


def norm(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream]:
    """A norm forward and backward."""
    of_heads = step.reads[0].split  # always RMSNorms
    forward, backward = EAGER_NORM["rmsnorm" if of_heads else shape.model.norm]
    moved, made = shape.activation_shape.nbytes(step.reads[0]), shape.generated
    return (
        Stream(step.name, 2 * moved, 1, forward, made),
        Stream(step.name, 3 * moved, 2, backward, made),
    )


def _rotary(shape: RankShape, step: LayerStep) -> Stream:
    """The mean over blocks, of which some may turn nothing."""
    moved = 2 * sum(map(shape.activation_shape.nbytes, step.reads))
    shares = shape.model.attention_shares.items()
    turned = sum(part for one, part in shares if one.rope_theta is not None)
    length = shape.training.sequence_length
    grown = sum(
        part for one, part in shares if one.growth is not None and one.growth.grows_within(length)
    )
    queries = 2 * shape.activation_shape.nbytes(step.reads[0])
    return Stream(step.name, moved * turned + queries * grown, 1, EAGER_ROTARY)


def _activations(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream]:
    """Of experts, of the MLP beside them, or of the only MLP."""
    if step.name == SHARED_ACTIVATION:
        return gated_by_score(shape, step) or activation(shape, step)
    return (weighting if shape.model.experts else activation)(shape, step)


def _residual(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream]:
    """A sum of the residual stream, with dropout of the added value."""
    name, hidden = step.name, shape.hidden
    masks = hidden // shape.element if shape.training.dropout else 0
    dropped = 2 * hidden + masks if shape.training.dropout else 0
    forward = Stream(name, 3 * hidden + masks, 1, EAGER_RESIDUAL if masks else 1.0)
    normed = step.gives[0] in (norm.reads[0] for norm in shape.steps(StepOp.NORM))
    # A norm's backward adds the other gradient of its input. Where two products read one value,
    # autograd adds theirs.
    first = name == f"{shape.model.mixer} residual"
    by_autograd = shape.model.norms == "after" or (shape.model.shared_norm and first)
    if shape.generated and normed:  # part of the norm's kernel, which reads and writes two tensors
        forward = Stream(name, 2 * hidden, 0, 1.5)
    fused = shape.generated or (shape.fused and shape.model.norm == "rmsnorm")
    if fused and not by_autograd:
        return forward, Stream(name, hidden, 0, 3.0)  # the norm's backward adds these bytes
    return forward, Stream(name, 3 * hidden + dropped, 1 + bool(dropped))


def _gathered_again(shape: RankShape) -> tuple[Collective, ...]:
    """With sequence parallelism the weight gradients need the gathered inputs a second time.

    They are gathered while the gradient by the input is computed (arXiv 2205.05198, section 4.2.2).
    A frozen product's input is gathered for its adapters alone.
    """
    products = {step.name: step for step in shape.steps(StepOp.PRODUCT)}
    up, shared = products.get("mlp up"), products.get(SHARED_UP)
    again, name = mixing(shape).into(shape, "again"), "mlp input again"
    if up and (up.saves or (shape.model.experts and (up.adapters or not shape.frozen))):
        again = (*again, *into_mlp(shape, name))
    elif shared and shared.saves:
        again = (*again, *into_shared(shape, name))
    if not shape.frozen:
        again = (*again, *into_router(shape, name))
    return tuple(Collective(one.name, one.pattern, one.nbytes, hidden=True) for one in again)


def _backward_workspace(shape: RankShape, tensors: tuple[Tensor, ...], saved: int) -> int:
    """Bytes that a block's backward needs beyond what its forward saved.

    Inside the backward of the gated activation three tensors of its width are new and one that was
    saved is gone. At the end all parameter gradients and a norm's five fp32 copies live, and no
    saved value does. Measured on an H200 at 4,096 / 8,192 / 16,384 tokens of hidden 4096, ffn
    14336: 319 / 520 / 923 MB; this gives 352 / 587 / 1057. A fused norm makes no such copies.

    With sequence parallelism the gradient of the MLP's output is gathered inside. Two saved tensors
    of the MLP's width and the inner one are gone by then, and two are new. Then the MLP's input is
    gathered again, beside the sum of its gradient and a rank's part of that sum.
    """
    hidden, inner, gathered = shape.model.hidden, inner_bytes(shape), shape.gathered
    if shape.model.experts:
        of_experts = backward_workspace(shape, tensors) + expert_adapters.backward_bytes(shape)
        inside = max(of_experts, shared_workspace(shape))
    else:
        # Torch's operators make silu(gate) a separate tensor beside both gradients.
        plain = shape.fused and not shape.generated and shape.model.gated
        matrix = 0 if shape.frozen else hidden * (shape.model.ffn // shape.tp) * shape.element
        # A norm or factor of what the MLP gives makes a gradient beside the residual stream's.
        beside = 0 if shape.model.adds_product_of("mlp") else shape.hidden
        inside = (2 + plain) * inner + matrix + gathered + beside
    again = 2 * gathered + shape.hidden - inner if gathered else 0
    copies = 0 if shape.generated else 5 * 4 * shape.tokens * hidden
    at_end = new_gradients(shape, tensors) + copies - saved
    # The mixer. Where scores are materialised, the gradients of dropout and softmax take two of the
    # saved five bytes each. Two saved tensors of the MLP's width are gone by then, but the native
    # runtime's rings keep what they hold.
    scores = 4 * score_bytes(shape.model, shape.activation_shape) // 5
    gone = 0 if shape.fused else 2 * inner
    within = scores + mixing(shape).backward_bytes(shape) - gone
    # Sums of gradients of heads that some ranks share need room beside the gradients of other
    # heads.
    few = [tensor for tensor in tensors if 1 < tensor.holders < shape.tp]
    every = sum(tensor.elements * shape.tp // tensor.holders for tensor in few)
    return max(inside, again, at_end, within + gathered, every * shape.training.gradient_bytes)
