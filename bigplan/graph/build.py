"""Layers to operators and tensors: the only place that knows what a transformer computes."""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.graph.activations import block_saved_bytes, boundary_bytes
from bigplan.graph.graph import (
    Attention,
    Collective,
    ElementSizes,
    Gemm,
    Graph,
    LayerKind,
    Operator,
    Stream,
    Tensor,
)
from bigplan.graph.strategy import Strategy
from bigplan.spec.model import ModelSpec, Parameter
from bigplan.spec.training import Training

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def build_graph(model: ModelSpec, training: Training, strategy: Strategy) -> Graph:
    """The graph of one optimizer step of `training` under `strategy`."""
    shape = _Shape(model, training, strategy)
    shared_table = model.tied_embeddings and strategy.pp == 1
    kinds = {
        "embedding": _embedding(shape, pinned=shared_table),
        "block": _block(shape),
        "head": _head(shape, shared_table=shared_table),
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
        parameter=ELEMENT_BYTES[training.precision],
        gradient=ELEMENT_BYTES[training.gradient_precision],
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
        sum(_elements(p) for p in model.kinds()["block"] if len(p.shape) == 2) * model.layers
        + model.vocab * model.hidden
    )
    attention = 6.0 * training.sequence_length * model.heads * model.head_dim * model.layers
    return tokens * (6.0 * matrices + attention)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes that every operator of one micro-batch on one rank is made of."""

    model: ModelSpec
    training: Training
    strategy: Strategy

    @property
    def tokens(self) -> int:
        return self.strategy.micro_batch * self.training.sequence_length

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.training.precision]

    @property
    def tp(self) -> int:
        return self.strategy.tp

    @property
    def hidden_bytes(self) -> int:
        """One hidden state of the micro-batch; norms and residuals are split by sequence."""
        return boundary_bytes(self.model, self.tokens, self.element)

    def all_reduce(self, count: int) -> tuple[Operator, ...]:
        return (Collective(self.hidden_bytes, count),) if self.tp > 1 else ()


def _elements(parameter: Parameter) -> int:
    rows, columns = parameter.shape if len(parameter.shape) == 2 else (1, parameter.shape[0])
    return rows * columns


def _local(parameter: Parameter, tp: int) -> Tensor:
    """A parameter as one tensor-parallel rank holds it, vocabulary rows padded up."""
    if len(parameter.shape) == 1:
        split = tp if parameter.tp == "rows" else 1
        return Tensor(parameter.name, 1, -(-parameter.shape[0] // split))
    rows, columns = parameter.shape
    if parameter.tp == "rows":
        rows = -(-rows // tp)
    elif parameter.tp == "columns":
        columns = -(-columns // tp)
    return Tensor(parameter.name, rows, columns)


def _tensors(shape: _Shape, kind: str) -> tuple[Tensor, ...]:
    return tuple(_local(parameter, shape.tp) for parameter in shape.model.kinds()[kind])


def _accumulate(shape: _Shape, tensors: tuple[Tensor, ...]) -> Stream:
    """Adding a micro-batch's gradient to the accumulator: read it, read and write the sum."""
    gradient = ELEMENT_BYTES[shape.training.gradient_precision]
    elements = sum(tensor.elements for tensor in tensors)
    return Stream(elements * (shape.element + 2 * gradient), launches=len(tensors))


def _twice(gemms: tuple[Gemm, ...]) -> tuple[Gemm, ...]:
    """The two products of a linear layer's backward: by the input and by the weight."""
    by_input = tuple(Gemm(g.m, g.k, g.n, g.count) for g in gemms)
    by_weight = tuple(Gemm(g.n, g.k, g.m, g.count) for g in gemms)
    return by_input + by_weight


def _block(shape: _Shape) -> LayerKind:
    model, tokens, tp = shape.model, shape.tokens, shape.tp
    heads = model.heads * model.head_dim // tp
    key_values = model.kv_heads * model.head_dim // tp
    ffn = model.ffn // tp
    gated = 2 if model.mlp == "swiglu" else 1
    gemms = (
        Gemm(tokens, heads, model.hidden),
        Gemm(tokens, key_values, model.hidden, count=2),
        Gemm(tokens, model.hidden, heads),
        Gemm(tokens, ffn, model.hidden, count=gated),
        Gemm(tokens, model.hidden, ffn),
    )
    # Query x key and probability x value, two FLOPs each, over the lower triangle.
    attention = 2.0 * tokens * shape.training.sequence_length * heads
    norm = Stream(2 * shape.hidden_bytes / tp, launches=1)
    residual = Stream(3 * shape.hidden_bytes / tp, launches=1)
    rotary = Stream(2 * tokens * (heads + key_values) * shape.element, launches=2)
    activation = Stream((gated + 1) * tokens * ffn * shape.element, launches=1)
    streams = (norm, rotary, residual, norm, activation, residual)
    tensors = _tensors(shape, "block")
    elements = sum(tensor.elements for tensor in tensors)
    saved = block_saved_bytes(
        model,
        tokens,
        shape.training.sequence_length,
        shape.element,
        tensor_parallel=tp,
        # fp32 attention kernels know no grouped heads: k and v are repeated for every query head
        expanded_kv=shape.element == ELEMENT_BYTES["fp32"] and model.heads != model.kv_heads,
    )
    return LayerKind(
        name="block",
        tensors=tensors,
        forward=(*gemms, Attention(attention), *streams, *shape.all_reduce(2)),
        # Flash attention's backward recomputes the scores: five products for the forward's two.
        backward=(
            *_twice(gemms),
            Attention(2.5 * attention, backward=True),
            *(Stream(2 * s.nbytes, s.launches) for s in streams),
            _accumulate(shape, tensors),
            *shape.all_reduce(2),
        ),
        saved=saved,
        boundary=shape.hidden_bytes,
        forward_workspace=2 * shape.hidden_bytes,
        backward_workspace=_block_backward_workspace(shape, elements, saved),
    )


def _block_backward_workspace(shape: _Shape, elements: int, saved: int) -> int:
    """Bytes that a block's backward needs beyond what its forward saved.

    Inside the backward of the gated activation three tensors of its width are new and one that was
    saved is gone; at the end all parameter gradients and a norm's five fp32 copies live and nothing
    that was saved does. Measured on an H200 at 4,096 / 8,192 / 16,384 tokens of hidden 4096, ffn
    14336: 319 / 520 / 923 MB; this gives 352 / 587 / 1057.
    """
    hidden, ffn = shape.model.hidden, shape.model.ffn // shape.tp
    inside = (2 * shape.tokens + hidden) * ffn * shape.element
    at_end = elements * shape.element + 5 * 4 * shape.tokens * hidden - saved
    return max(inside, at_end)


def _embedding(shape: _Shape, *, pinned: bool) -> LayerKind:
    tensors = _tensors(shape, "embedding")
    elements = sum(tensor.elements for tensor in tensors)
    token_bytes = 8 * shape.tokens
    return LayerKind(
        name="embedding",
        tensors=tensors,
        forward=(Stream(2 * shape.hidden_bytes), *shape.all_reduce(1)),
        # autograd writes a dense gradient of the whole table, then it is added to the sum
        backward=(
            Stream(elements * shape.element + 2 * shape.hidden_bytes, launches=2),
            _accumulate(shape, tensors),
        ),
        saved=token_bytes,
        boundary=token_bytes,
        forward_workspace=0,
        backward_workspace=elements * shape.element,
        pinned=pinned,
        stores_activations=False,
    )


LOSS_CHUNK_TOKENS = 1024  # logits of so many tokens live at once: 1.3 GB for 128,256 words


def _head(shape: _Shape, *, shared_table: bool) -> LayerKind:
    """The loss layer: its forward does nothing, its backward runs both on chunks of tokens."""
    model, tokens = shape.model, shape.tokens
    tensors = _tensors(shape, "head")
    table = Tensor("lm_head.weight", -(-model.vocab // shape.tp), model.hidden)
    if not shared_table and all(tensor.name != table.name for tensor in tensors):
        tensors = (*tensors, table)  # tied, but the other copy lives on another pipeline stage
    written = (*tensors, table) if shared_table else tensors
    chunk = min(tokens, LOSS_CHUNK_TOKENS)
    chunks = -(-tokens // chunk)
    gemm = Gemm(chunk, table.rows, model.hidden, count=chunks)
    # Logits in the compute dtype, their fp32 copy and the log-softmax live at once.
    per_logit = 12 if shape.element == 4 else shape.element + 8
    gradients = sum(tensor.elements for tensor in written) * shape.element
    accumulate = _accumulate(shape, written)
    return LayerKind(
        name="head",
        tensors=tensors,
        forward=(),
        backward=(
            gemm,
            *_twice((gemm,)),
            Stream(4 * tokens * table.rows * per_logit, launches=8 * chunks),
            Stream(chunks * accumulate.nbytes, chunks * accumulate.launches),
            *shape.all_reduce(2),
        ),
        saved=0,
        boundary=0,
        forward_workspace=0,
        backward_workspace=chunk * table.rows * per_logit + 3 * shape.hidden_bytes + gradients,
        stores_activations=False,
    )
