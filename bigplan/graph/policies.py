"""What other frameworks run in a block that the planner's own does not.

Where they recompute "selectively", frameworks differ in what runs again.

`block.py` runs norms and activation again. Megatron-LM runs the attention core again
(`recompute_granularity`, arXiv 2205.05198), also where it is a flash kernel. torchtitan decides
operator by operator (`_apply_op_sac` in its activation_checkpoint.py): it keeps what attention and
every other linear layer give, and runs the rest again. JAX's policy of dots with no batch
dimension (`SAVE_DOT_WITH_NO_BATCH_DIM` of Pax, `dots_with_no_batch_dims_saveable`) keeps products
of weights and runs the rest again, attention among it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from bigplan.graph.graph import Graph, LayerKind, Recompute, Rerun
from bigplan.graph.head import COMPILED_LOGIT_BYTES, LOGIT_BYTES
from bigplan.graph.operators import (
    ALIGNED,
    Attention,
    Collective,
    Gemm,
    Operator,
    Pattern,
    Stream,
)
from bigplan.graph.reruns import unread
from bigplan.graph.shape import RankShape, local_tensor
from bigplan.spec.layers import BLOCK
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import LayerStep, StepOp, StepValue

Selective = Literal["cheap", "core", "operators", "dots"]


def selecting(graph: Graph, shape: RankShape, policy: Selective) -> Graph:
    """The graph with another selective recomputation of its blocks.

    Where scores are materialised, all frameworks but JAX's run the core again and nothing else.
    """
    if policy == "cheap" or (policy != "dots" and shape.training.attention == "materialised"):
        return graph
    block = graph.kinds[BLOCK]
    if policy == "core":
        rerun = _core(block)
    else:
        rerun = _by_operator(shape, block) if policy == "operators" else _but_dots(shape, block)
    changed = replace(block, reruns={**block.reruns, Recompute.SELECTIVE: rerun})
    return replace(graph, kinds={**graph.kinds, BLOCK: changed})


def summing_apart(graph: Graph, products: tuple[int, int]) -> Graph:
    """The graph where each of several column-parallel products sums its input's gradient.

    `products` read the input of attention and of the MLP. With sequence parallelism the gradients
    are added before ranks scatter their sum, so nothing changes.
    """
    block = graph.kinds[BLOCK]
    times = dict(zip(("attention input sum", "mlp input sum"), products, strict=True))

    def apart(one: Operator) -> Operator:
        if isinstance(one, Collective) and one.pattern == "all_reduce":
            return replace(one, count=one.count * times.get(one.name, 1))
        return one

    changed = replace(block, backward=tuple(apart(one) for one in block.backward))
    return replace(graph, kinds={**graph.kinds, BLOCK: changed})


def gathering_for_adapters(graph: Graph, shape: RankShape) -> Graph:
    """The graph where adapters of column-parallel products gather what they read, and sum its
    gradient, themselves.

    Megatron's do with sequence parallelism where the products' own collectives are pipelined with
    them (`ParallelLinearAdapter`, `return_layernorm_output_gathered`); else both read one tensor.
    """
    if shape.tp == 1 or not shape.strategy.sequence_parallel:
        return graph
    read = [step.adapters[0] for step in shape.steps(StepOp.PRODUCT) if step.adapters]
    count = sum(local_tensor(a, shape.tp).columns == local_tensor(a, 1).columns for a in read)
    ways: tuple[Pattern, ...] = ("all_gather", "reduce_scatter")
    gather, scatter = (
        Collective("adapters' input", way, shape.whole_hidden, count, exposed=True) for way in ways
    )
    block = graph.kinds[BLOCK]
    changed = replace(block, forward=(*block.forward, gather), backward=(*block.backward, scatter))
    return replace(graph, kinds={**graph.kinds, BLOCK: changed})


def padding_products(graph: Graph) -> Graph:
    """The graph where every product's sides are a multiple of ALIGNED, as a compiler pads them.

    Those of torch.compile (`shape_padding` of inductor, `pad_mm.py`) and of XLA do. The copies that
    this takes are left out: they are fused with what writes the inputs, or are a few passes.
    """

    def padded(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        return tuple(
            replace(one, m=_whole(one.m), n=_whole(one.n), k=_whole(one.k))
            if isinstance(one, Gemm)
            else one
            for one in operators
        )

    def changed(kind: LayerKind) -> LayerKind:
        reruns = {k: v._replace(operators=padded(v.operators)) for k, v in kind.reruns.items()}
        return replace(
            kind, forward=padded(kind.forward), backward=padded(kind.backward), reruns=reruns
        )

    return replace(graph, kinds={name: changed(kind) for name, kind in graph.kinds.items()})


def _whole(side: int) -> int:
    return -(-side // ALIGNED) * ALIGNED


def fusing_norms(graph: Graph, model: ModelSpec) -> Graph:
    """The graph where norms are one kernel each, also among chains of plain kernels."""

    def fused(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        return tuple(
            replace(one, eager=1.0) if isinstance(one, Stream) and one.name in norms else one
            for one in operators
        )

    block = graph.kinds[BLOCK]
    norms = {step.name for step in model.steps(BLOCK) if step.op is StepOp.NORM}
    reruns = {k: v._replace(operators=fused(v.operators)) for k, v in block.reruns.items()}
    changed = replace(
        block, forward=fused(block.forward), backward=fused(block.backward), reruns=reruns
    )
    return replace(graph, kinds={**graph.kinds, BLOCK: changed})


# Of rotary positions that Megatron Core turns by torch's operators, forward and backward in place
# of 2: tensors read and written, and kernels for queries and for keys. Counted from autograd by
# test (`_apply_rotary_pos_emb_bshd` of its rope_utils.py).
TURNED_PASSES = 12, 14
TURNED_KERNELS = 12, 7


def turning_by_torch(graph: Graph, model: ModelSpec) -> Graph:
    """The graph where torch's operators turn positions if cos and sin have a factor (YaRN).

    Transformer Engine's fused kernel takes none (`apply_rotary_pos_emb`: `mscale != 1.0`). Latent
    attention has a kernel of its own.
    """
    scaling = model.rope_scaling
    if scaling is None or scaling.angle_factor == 1.0 or model.latent_attention is not None:
        return graph
    block = graph.kinds[BLOCK]
    names = {step.name for step in model.steps(BLOCK) if step.op is StepOp.ROTARY}

    def turned(operators: tuple[Operator, ...], which: int) -> tuple[Operator, ...]:
        times, kernels = TURNED_PASSES[which] / 2, 2 * TURNED_KERNELS[which]
        return tuple(
            replace(one, nbytes=round(times * one.nbytes), launches=kernels)
            if isinstance(one, Stream) and one.name in names
            else one
            for one in operators
        )

    reruns = {k: v._replace(operators=turned(v.operators, 0)) for k, v in block.reruns.items()}
    forward, backward = turned(block.forward, 0), turned(block.backward, 1)
    changed = replace(block, forward=forward, backward=backward, reruns=reruns)
    return replace(graph, kinds={**graph.kinds, BLOCK: changed})


def cutting_documents(graph: Graph, tokens: int) -> Graph:
    """The graph where attention sees documents of so many tokens, by kernels of unequal sequences.

    Each is a sequence of its own (cuDNN's and FlashAttention's `cu_seqlens`).
    """

    def cut(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        return tuple(
            replace(one, flops=one.flops * tokens / one.length, length=tokens)
            if isinstance(one, Attention) and tokens < one.length
            else one
            for one in operators
        )

    block = graph.kinds[BLOCK]
    reruns = {k: v._replace(operators=cut(v.operators)) for k, v in block.reruns.items()}
    changed = replace(
        block, forward=cut(block.forward), backward=cut(block.backward), reruns=reruns
    )
    return replace(graph, kinds={**graph.kinds, BLOCK: changed})


def compiling_loss(graph: Graph) -> Graph:
    """The graph where torch.compile makes the loss one kernel forward and one backward."""
    head = graph.kinds["head"]

    def compiled(one: Operator) -> Operator:
        if isinstance(one, Stream) and one.name == "loss":
            return replace(one, nbytes=one.nbytes * COMPILED_LOGIT_BYTES // LOGIT_BYTES)
        return one

    changed = replace(head, backward=tuple(map(compiled, head.backward)))
    return replace(graph, kinds={**graph.kinds, "head": changed})


def gathering_logits(graph: Graph) -> Graph:
    """The graph where tensor-parallel ranks gather the logits and each takes the whole loss."""
    head, tp = graph.kinds["head"], graph.strategy.tp
    product = next((one for one in head.backward if isinstance(one, Gemm)), None)
    if product is None or tp == 1:
        return graph
    others = product.m * product.n * product.count * (tp - 1)  # logits of other ranks' words

    def whole(one: Operator) -> Operator:
        if isinstance(one, Stream) and one.name == "loss":
            return replace(one, nbytes=one.nbytes * tp)
        return one

    nbytes = graph.sizes.parameter * others * tp // (tp - 1)
    gather = Collective("logits", "all_gather", nbytes)
    changed = replace(
        head,
        backward=(*map(whole, head.backward), gather),
        # Eager torch holds 12 bytes a logit at once (`_head` in build.py).
        backward_workspace=head.backward_workspace + 12 * others // product.count,
    )
    return replace(graph, kinds={**graph.kinds, "head": changed})


def autocasting(graph: Graph, shape: RankShape) -> Graph:
    """The graph where torch.autocast casts fp32 parameters for each product.

    It casts no embedding, sum or norm, so the values between blocks are in fp32, as are the inputs
    of norms that these keep. Parameters that ZeRO-3 gathers are in fp32, too, without a copy of
    their own; elsewhere their 16-bit copies live from forward to backward and take as much as
    parameters beside a master would.
    """
    block, size = graph.kinds[BLOCK], shape.activation_shape
    read = (step.reads[0] for step in shape.steps(StepOp.NORM) if not step.reads[0].split)
    wider = sum(size.nbytes(value, 4) - size.nbytes(value) for value in read)
    boundary = block.boundary * 4 // shape.element
    reruns = {
        recompute: one._replace(kept=boundary if recompute is Recompute.FULL else one.kept + wider)
        for recompute, one in block.reruns.items()
    }
    changed = replace(block, saved=block.saved + wider, boundary=boundary, reruns=reruns)
    sizes = graph.sizes
    if graph.strategy.zero == 3:
        sizes = replace(sizes, parameter=4, state=8, master=False)
    return replace(graph, sizes=sizes, kinds={**graph.kinds, BLOCK: changed})


def _core(block: LayerKind) -> Rerun:
    """The attention core alone. Its inputs stay, and the next product keeps its result."""
    return Rerun(block.saved, tuple(op for op in block.forward if isinstance(op, Attention)))


def _but_dots(shape: RankShape, block: LayerKind) -> Rerun:
    """All but products of weights, whose results are kept beside the block's input."""
    steps, size = shape.model.steps(BLOCK), shape.activation_shape
    left_out = {step.name for step in unread(steps)}
    products = [step for step in shape.steps(StepOp.PRODUCT) if step.name not in left_out]
    kept = shape.hidden + sum(size.nbytes(value) for step in products for value in step.gives)
    not_again = left_out | {step.name for step in shape.steps(StepOp.PRODUCT)}
    again = (op for op in block.forward if not isinstance(op, Collective))
    return Rerun(kept, tuple(op for op in again if op.name not in not_again))


def _by_operator(shape: RankShape, block: LayerKind) -> Rerun:
    """Every second linear layer runs again, and all memory-bound operators."""
    steps, size = shape.model.steps("block"), shape.activation_shape
    layers = [(s, value) for s in steps if s.op is StepOp.PRODUCT for value in s.gives]
    mixed = next(step for step in steps if step.op is StepOp.ATTENTION)
    kept = shape.hidden + sum(size.nbytes(value) for value in (*mixed.gives, *_values(layers[::2])))
    kept += sum(size.nbytes(value, 4) for value in mixed.statistics)
    left_out = {step.name for step in unread(steps)}
    again = [(s, value) for s, value in layers[1::2] if s.name not in left_out]
    return Rerun(kept, (*_products(shape, again), *_others(block, left_out)))


def _values(layers: list[tuple[LayerStep, StepValue]]) -> Iterator[StepValue]:
    return (value for _, value in layers)


def _products(shape: RankShape, layers: list[tuple[LayerStep, StepValue]]) -> Iterator[Gemm]:
    fp8 = shape.training.fp8_gemms
    for step, value in layers:
        inner = step.reads[0].columns(shape.tp)
        yield Gemm(step.name, shape.tokens, value.columns(shape.tp), inner, fp8=fp8)


def _others(block: LayerKind, left_out: set[str]) -> Iterator[Operator]:
    """Streams and gathers of the forward, and the sum after attention; no casts to fp8."""
    for one in block.forward:
        stream = isinstance(one, Stream) and one.name not in left_out and "fp8" not in one.name
        if stream or (isinstance(one, Collective) and "mlp output" not in one.name):
            yield one
