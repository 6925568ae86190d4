"""Layers to operators and tensors: the only place that knows what a transformer computes."""

from __future__ import annotations

from bigplan.graph.block import Shape, block, by_input_and_weight, gradient_sum, local_tensors
from bigplan.graph.graph import ElementSizes, Graph, LayerKind, Tensor
from bigplan.graph.operators import Gemm, Stream
from bigplan.graph.strategy import Strategy
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import DTYPE_BYTES, Training

LOSS_CHUNK_TOKENS = 1024  # logits of so many tokens live at once: 1.3 GB for 128,256 words


def build_graph(
    model: ModelSpec,
    training: Training,
    strategy: Strategy,
    loss_chunk: int | None = LOSS_CHUNK_TOKENS,
    context_parallel: int = 1,
) -> Graph:
    """The graph of one optimizer step of `training` under `strategy`.

    The loss takes `loss_chunk` tokens at a time; None: a whole micro-batch. With context
    parallelism a rank has that part of every sequence (priced for published runs, not planned).
    """
    shape = Shape(model, training, strategy, context_parallel)
    shared_table = model.tied_embeddings and strategy.pp == 1
    chunk = min(shape.tokens, loss_chunk or shape.tokens)
    kinds = {
        "embedding": _embedding(shape, pinned=shared_table),
        "block": block(shape),
        "head": _head(shape, chunk, shared_table=shared_table),
    }
    return Graph(
        strategy=strategy,
        layers=model.layer_sequence(),
        kinds=kinds,
        sizes=element_sizes(training),
        micro_batches=strategy.micro_batches(training),
        clipped=training.clip_norm is not None,
        tied=shared_table,
    )


def element_sizes(training: Training) -> ElementSizes:
    """Bytes per element: AdamW keeps two fp32 moments, mixed precision an fp32 master as well."""
    master = training.precision != "fp32"
    return ElementSizes(
        parameter=DTYPE_BYTES[training.precision],
        gradient=DTYPE_BYTES[training.gradient_precision],
        state=12 if master else 8,
        master=master,
    )


def model_flops(model: ModelSpec, training: Training) -> float:
    """Useful FLOPs of one step: six per matrix weight and token, causal attention, no recompute.

    The embedding look-up is no matrix product and counts nothing; the LM head counts even where
    its table is tied.
    """
    tokens = training.global_batch * training.sequence_length
    matrices = (
        sum(p.count for p in model.kinds()["block"] if len(p.shape) == 2) * model.layers
        + model.vocab * model.hidden
    )
    attention = 6.0 * training.sequence_length * model.heads * model.head_dim * model.layers
    return tokens * (6.0 * matrices + attention)


def _embedding(shape: Shape, *, pinned: bool) -> LayerKind:
    tensors = local_tensors(shape, "embedding")
    elements = sum(tensor.elements for tensor in tensors)
    token_bytes = 8 * shape.tokens
    look_up = 2 * shape.whole_hidden
    return LayerKind(
        name="embedding",
        tensors=tensors,
        forward=(Stream("look-up", look_up), *shape.out_of_matrix("embedding")),
        # autograd writes a dense gradient of the whole table, then it is added to the sum
        backward=(
            Stream("look-up", elements * shape.element + look_up, launches=2),
            gradient_sum(shape, tensors),
            *shape.into_matrix("embedding"),
        ),
        saved=token_bytes,
        boundary=token_bytes,
        selective=token_bytes,
        cheap=(),
        forward_workspace=0,
        backward_workspace=elements * shape.element,
        pinned=pinned,
        stores_activations=False,
    )


# Linear and cross-entropy of 8192 x 4096 x 128256 on an H200 take 5.1 ms more than their products
# when compiled, 18.2 ms more in eager torch: 20 and 72 bytes a logit at the rate of a copy.
LOGIT_BYTES = 20
EAGER_LOSS = 3.6


def _head(shape: Shape, chunk: int, *, shared_table: bool) -> LayerKind:
    """The loss layer: its forward does nothing, its backward runs both on chunks of tokens."""
    model, tokens = shape.model, shape.tokens
    tensors = local_tensors(shape, "head")
    table = Tensor("lm_head.weight", -(-model.vocab // shape.tp), model.hidden)
    if not shared_table and all(tensor.name != table.name for tensor in tensors):
        tensors = (*tensors, table)  # tied, but the other copy lives on another pipeline stage
    written = (*tensors, table) if shared_table else tensors
    chunks = -(-tokens // chunk)
    gemm = Gemm("lm head", chunk, table.rows, model.hidden, count=chunks)
    # Logits in the compute dtype, their fp32 copy and the log-softmax live at once.
    per_logit = 12 if shape.element == 4 else shape.element + 8
    gradients = sum(tensor.elements for tensor in written) * shape.element
    add = gradient_sum(shape, written)
    return LayerKind(
        name="head",
        tensors=tensors,
        forward=(),
        backward=(
            gemm,
            *by_input_and_weight((gemm,)),
            Stream("loss", LOGIT_BYTES * tokens * table.rows, 2 * chunks, eager=EAGER_LOSS),
            Stream("final norm", 5 * shape.hidden, launches=3),
            Stream(add.name, chunks * add.nbytes, chunks * add.launches, add.eager),
            *shape.into_matrix("lm head"),
            *shape.out_of_matrix("lm head"),
        ),
        saved=0,
        boundary=0,
        selective=0,
        cheap=(),
        forward_workspace=0,
        backward_workspace=chunk * table.rows * per_logit + 3 * shape.whole_hidden + gradients,
        stores_activations=False,
    )
