"""Layers to operators and tensors: the only place that knows what a transformer computes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bigplan.graph.activations import saved_values
from bigplan.graph.block import block, norm
from bigplan.graph.graph import LOSS_CHUNK_TOKENS, ElementSizes, Graph, LayerKind, Tensor
from bigplan.graph.head import head
from bigplan.graph.inputs import (
    carried_bytes,
    embedding_tensors,
    handed_bytes,
    inputs_bytes,
    looked_up,
    with_carried,
)
from bigplan.graph.muon import by_muon
from bigplan.graph.operators import Gemm, Operator, Stream, doubled_reach
from bigplan.graph.shape import RankShape, gradient_sum, local_tensors
from bigplan.graph.strategy import Strategy
from bigplan.graph.sums import into_matrix, out_of_matrix
from bigplan.mechanics import LOOKED_UP_ROWS
from bigplan.spec.carried import INPUTS, inputs_width
from bigplan.spec.layers import BLOCKS
from bigplan.spec.lora import passed_count
from bigplan.spec.mixers import ATTENTION, DELTA_RULE, STATE_SPACE
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import StepOp
from bigplan.spec.training import Training


def build_graph(
    model: ModelSpec,
    training: Training,
    strategy: Strategy,
    loss_chunk: int | None = LOSS_CHUNK_TOKENS,
    fused: bool = False,
    multiprocessors: int = 1,
) -> Graph:
    """The graph of one optimizer step of `training` under `strategy`.

    The loss takes `loss_chunk` tokens at a time; None: a whole micro-batch. `fused` means the
    native runtime on CUDA, whose products add to sums of gradients. `multiprocessors` of a GPU
    decide how many sums a deterministic attention has.
    """
    shape = RankShape(model, training, strategy, fused=fused, multiprocessors=multiprocessors)
    return graph_of_shape(shape, loss_chunk)


def graph_of_shape(shape: RankShape, loss_chunk: int | None) -> Graph:
    """As build_graph, of a shape: also on a GPU, or with the context parallelism of other tools."""
    model, training, strategy = shape.model, shape.training, shape.strategy
    chunk = min(shape.tokens, loss_chunk or shape.tokens)
    kinds = {"embedding": with_carried(shape, _embedding(shape))}
    if model.block_inputs is not None:
        kinds[INPUTS] = _inputs(shape)
    for kind in dict.fromkeys(model.block_kinds):
        seen = replace(shape, model=model.seen_by(kind))
        if not seen.model.experts:
            seen = replace(seen, dispatched=False)
        kinds[kind] = replace(block(seen), name=kind)
    kinds["head"] = head(shape, chunk)
    if training.optimizer.name == "muon":
        kinds = {name: by_muon(kind, model, training.optimizer) for name, kind in kinds.items()}
    return Graph(
        strategy=strategy,
        layers=model.layer_sequence(),
        kinds=kinds,
        sizes=element_sizes(training),
        micro_batches=strategy.micro_batches(training),
        deferred=training.deferred_updates,
        tied=model.tied_embeddings,
        loss_chunk=chunk,
        document_bytes=_document_bytes(training, strategy),
        handed=handed_bytes(shape) if strategy.pp > 1 else 0,
        carried=carried_bytes(shape),
    )


def _document_bytes(training: Training, strategy: Strategy) -> int:
    """Bytes on each GPU of two 32-bit places for each token of its sequences in a step.

    See runtime/documents.py. Ranks that split sequences have them of whole ones.
    """
    if not training.isolate_documents:
        return 0
    sequences = strategy.micro_batches(training) * strategy.micro_batch
    return 2 * 4 * sequences * training.sequence_length


MOST_LOGITS = 2**31 - 1  # at once: kernels count them with 32 bits


def loss_chunks(model: ModelSpec, training: Training, strategy: Strategy) -> tuple[int, ...]:
    """Values that a plan may take as `loss_chunk`, smallest first, doubled up to a micro-batch."""
    tokens = strategy.rank_tokens(training)
    most = MOST_LOGITS // -(-model.vocab // strategy.tp)
    chunks = [min(LOSS_CHUNK_TOKENS, tokens)]
    while chunks[-1] < tokens and (larger := min(2 * chunks[-1], tokens)) <= most:
        chunks.append(larger)
    return tuple(chunks)


def loss_layer(
    model: ModelSpec, training: Training, strategy: Strategy, loss_chunk: int, fused: bool
) -> LayerKind:
    """The last layer of build_graph's graph, alone."""
    shape = RankShape(model, training, strategy, fused=fused)
    return head(shape, min(shape.tokens, loss_chunk))


def element_sizes(training: Training) -> ElementSizes:
    """Bytes per element: the optimizer's moments, in mixed precision an fp32 master too."""
    master, optimizer = training.precision != "fp32", training.optimizer
    return ElementSizes(
        parameter=training.compute_bytes,
        gradient=training.gradient_bytes,
        state=optimizer.kept_bytes + 4 * master,
        master=master,
        moments=optimizer.moments,
        second=4 * optimizer.seconds,
    )


def model_flops(model: ModelSpec, training: Training) -> float:
    """Useful FLOPs of one step: six per matrix weight and token, causal attention, no recompute.

    Frozen weights have no gradient and count four. Then adapters count six.

    Of delta rules the recurrence counts. Within a sliding window, attention counts the tokens that
    it sees, and within documents that are kept apart those of documents, where their lengths are
    known. Of experts, those that a token passes count; their biases, which are added by products,
    do not.

    The embedding look-up is no matrix product and does not count. The LM head counts even where its
    table is tied.
    """
    tokens = training.global_batch * training.sequence_length
    matrices = (
        sum(
            model.passed(p)
            for kind in model.layer_sequence()
            if kind in BLOCKS
            for p in model.kinds()[kind]
            if len(p.shape) == 2 and not (p.constant or p.filters or p.name.endswith(".bias"))
        )
        + (model.vocab + inputs_width(model)) * model.hidden
    )
    each = 6.0 if training.lora is None else 4.0
    adapted = passed_count(model, training.lora)
    length = training.attended_length
    kinds = map(model.seen_by, model.block_kinds)
    attention = 3.0 * sum(
        doubled_reach(*one.within(length)) * seen.heads * (seen.head_dim + seen.value_width)
        for one, mixer, seen in zip(model.attentions, model.mixers, kinds, strict=True)
        if mixer == ATTENTION or model.attention_beside is not None
    )
    return tokens * (each * matrices + 6.0 * adapted + attention + _rule_flops(model))


def _rule_flops(model: ModelSpec) -> float:
    """Of delta rules and state spaces, for a token; in chunks it is more.

    Two FLOPs for each element of a state each time: a delta rule's is read by a key, updated, and
    read by a query; a state space's is updated and read. Twice that in the backward.
    """
    found = 0
    if (rule := model.delta_rule) is not None:
        state = rule.value_heads * rule.key_dim * rule.value_dim
        found += 3 * state * model.mixers.count(DELTA_RULE)
    if (space := model.state_space) is not None:
        found += 2 * space.width * space.state * model.mixers.count(STATE_SPACE)
    return 3.0 * 2 * found


def _embedding(shape: RankShape) -> LayerKind:
    tensors, _ = embedding_tensors(shape)
    # Tokens; where the loss is on the same GPU, its targets, which come with them.
    token_bytes = (16 if shape.strategy.pp == 1 else 8) * shape.tokens
    gradient = _gradient_by_rows(shape, tensors) if shape.fused else _dense_gradient(shape, tensors)
    learned = shape.model.positions == "learned"
    added = (Stream("positions", 3 * shape.whole_hidden),) if learned else ()
    restarted = learned and shape.training.isolate_documents  # positions' rows are gathered
    steps = shape.every_step("embedding")
    scales = tuple(Stream(step.name, 2 * shape.hidden) for step in steps if step.op is StepOp.SCALE)
    norms = tuple(norm(shape, step) for step in steps if step.op is StepOp.NORM and step.saves)
    kept = sum(saved_values(shape.model, shape.activation_shape, "embedding").values())
    backward = (
        *(backward for _, backward in norms),
        *scales,
        *gradient.operators,
        *into_matrix(shape, "embedding"),
    )
    return LayerKind(
        name="embedding",
        tensors=tensors,
        scaled=shape.scaled,
        forward=(
            Stream("look-up", 2 * shape.whole_hidden),
            *added,
            *out_of_matrix(shape, "embedding"),
            *scales,
            *(forward for forward, _ in norms),
        ),
        # A frozen table needs no gradient, and no layer before it does.
        backward=() if shape.frozen else backward,
        frozen=shape.frozen,
        idle_backward=shape.frozen,
        saved=token_bytes + (0 if shape.frozen else kept),
        boundary=token_bytes,
        reruns={},
        forward_workspace=shape.whole_hidden * (learned + restarted + len(scales)) + shape.gathered,
        backward_workspace=(
            0
            if shape.frozen
            else gradient.workspace
            + shape.whole_hidden * (len(norms) + len(scales))
            + shape.gathered
        ),
        largest=0 if shape.frozen else gradient.largest,
        pinned=shape.model.tied_embeddings,
        stores_activations=False,
        looked_up=_looked_up(shape, tensors),
    )


def _looked_up(shape: RankShape, tensors: tuple[Tensor, ...]) -> int:
    """Elements of a micro-batch's rows of the embedding's tables; 0: these come whole.

    Other weights would not come with the rows.
    """
    model = shape.model
    alone = not model.tied_embeddings and not model.embedding_norm and model.block_inputs is None
    return looked_up(shape, tensors) if alone else 0


def _inputs(shape: RankShape) -> LayerKind:
    """All blocks' tables: rows by token, added to what the embedding has made of it."""
    tensors, made = local_tensors(shape, INPUTS), inputs_bytes(shape)
    gradient = _gradient_by_rows(shape, tensors) if shape.fused else _dense_gradient(shape, tensors)
    return LayerKind(
        name=INPUTS,
        tensors=tensors,
        scaled=shape.scaled,
        forward=(Stream("look-up", 5 * made, launches=4),),
        backward=() if shape.frozen else (Stream("scale", 4 * made, 2), *gradient.operators),
        frozen=shape.frozen,
        idle_backward=shape.frozen,
        saved=0,
        boundary=shape.hidden,
        reruns={},
        forward_workspace=2 * made,
        backward_workspace=0 if shape.frozen else gradient.workspace + 2 * made,
        largest=made if shape.frozen else max(made, gradient.largest),
        stores_activations=False,
        looked_up=looked_up(shape, tensors),
    )


class _TableGradient(NamedTuple):
    """The cost of a micro-batch's gradient of looked-up rows, with its addition to the sum."""

    operators: tuple[Operator, ...]
    workspace: int  # bytes
    largest: int  # bytes of one tensor


def _dense_gradient(shape: RankShape, tensors: tuple[Tensor, ...]) -> _TableGradient:
    """Autograd writes a gradient of the whole table, which is then added to the sum."""
    whole = shape.element * sum(tensor.elements for tensor in tensors)
    rows = shape.element * shape.tokens * tensors[0].columns
    learned = shape.model.positions == "learned"
    streams = (
        Stream("look-up", whole + 2 * rows, launches=2),
        gradient_sum(shape, tensors),
    )
    return _TableGradient(streams, whole + rows * learned, whole)


LAUNCHES_OF_ROWS = 6  # kernels that gather and add up LOOKED_UP_ROWS rows
LAUNCHES_OF_SORTING = 8  # kernels before these


def _gradient_by_rows(shape: RankShape, tensors: tuple[Tensor, ...]) -> _TableGradient:
    """The native runtime adds rows to the sum (runtime/layers/lookup.py).

    It sorts the rows and makes a copy in which equal rows lie together. A product with a matrix of
    ones and zeros adds equal rows up. The result is narrowed from fp32 for a 16-bit sum and added
    to that. The first micro-batch of a unit also clears the sum, which is counted for all of them.
    """
    gradient, columns, tables = shape.training.gradient_bytes, tensors[0].columns, len(tensors)
    rows, calls = min(shape.tokens, LOOKED_UP_ROWS), -(-shape.tokens // LOOKED_UP_ROWS)
    look_up = tables * shape.tokens * columns * (2 * shape.element + 4 + 2 * gradient)
    launches = tables * (LAUNCHES_OF_SORTING + (LAUNCHES_OF_ROWS - 1) * calls)
    operators = (
        Stream("look-up", look_up, launches=launches),
        Gemm("equal rows", rows, columns, rows, count=tables * calls),
        Stream("gradient sum", gradient * sum(tensor.elements for tensor in tensors)),
    )
    # Tokens, sorted and with their places, and the sort's own copies of both.
    numbers = 8 * shape.tokens
    narrowed = gradient * rows * columns if gradient < 4 else 0
    beside = max(shape.element * rows * rows, narrowed)
    sums = 4 * rows * columns
    copied = shape.element * rows * columns
    return _TableGradient(operators, copied + beside + sums + 4 * numbers, sums)
