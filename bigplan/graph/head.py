"""The loss layer as operators: the head's product, the loss by chunks of tokens, their gradients.

Where pairs of responses are learned from, tokens' losses come first, by the same product
(runtime/layers/preference.py).
"""

from __future__ import annotations

from dataclasses import replace

from bigplan.graph.graph import LayerKind, Tensor
from bigplan.graph.operators import (
    Collective,
    Gemm,
    Operator,
    Stream,
    by_input,
    by_input_and_weight,
)
from bigplan.graph.shape import RankShape, gradient_sum, local_tensors, new_gradients
from bigplan.graph.sums import into_matrix, out_of_matrix

# Bytes a token of losses, weights, and numbers of responses (fp64 and int64 while they are summed).
PAIR_BYTES = 48

# Linear and cross-entropy of 8192 x 4096 x 128256 on an H200 take 5.1 ms more than their products
# when compiled, 18.2 ms more in eager torch: 20 and 72 bytes a logit at the rate of a copy.
LOGIT_BYTES = 20
EAGER_LOSS = 3.6
# torch.compile of both. On H100s the same case takes 0.9 to 2.0 ms longer than with this project's
# kernel, which moves 6 bytes a logit: 8.6 to 11.7 bytes, 10.4 in the mean of four runs
# (benchmarks/results/2026-11-25-h100-kernels, -again and -whole). The products of LOGIT_BYTES were
# timed alone, and faster than under load.
COMPILED_LOGIT_BYTES = 10


def _loss_in_place(shape: RankShape) -> bool:
    """Whether the logits' gradient overwrites them; it always does where ranks share logits."""
    return shape.generated or (shape.fused and (shape.tp > 1 or _of_pairs(shape)))


def _of_pairs(shape: RankShape) -> bool:
    """Whether pairs of responses are learned from."""
    return shape.training.preference is not None


def _loss(shape: RankShape, logits: int, launches: int) -> Stream:
    """Softmax and cross-entropy; the native kernels read logits twice and write their gradient."""
    if shape.generated and shape.tp == 1 and not _of_pairs(shape):
        # One kernel does both. Its second read comes from memory, too, where the rows under way
        # exceed the L2 cache, as those of large vocabularies do.
        return Stream("loss", 3 * shape.element * logits, launches // 2, generated=True)
    if _loss_in_place(shape):
        return Stream("loss", 3 * shape.element * logits, launches)
    return Stream("loss", LOGIT_BYTES * logits, launches, eager=EAGER_LOSS)


# Reads and writes of a logit that is capped, forward and backward: of 16 bits where ranks share the
# words (runtime/parallel/words.py), else of fp32 (operators.capped). Kernels of a chunk of tokens.
SHARED_CAP_PASSES, CAP_PASSES, CAP_LAUNCHES = 17, 15, 8
FIRST_CAP_PASSES = 6  # of three kernels forward, each in place


def _cap(shape: RankShape, logits: int, chunks: int) -> tuple[Stream, ...]:
    """What caps scores of words, where the loss's kernel does not."""
    in_kernel = shape.generated and shape.tp == 1 and not _of_pairs(shape)
    if shape.model.logit_cap is None or in_kernel:
        return ()
    by_hand = shape.tp > 1 or _of_pairs(shape)
    moved = SHARED_CAP_PASSES * shape.element if by_hand else 4 * CAP_PASSES
    return (Stream("logit cap", moved * logits, CAP_LAUNCHES * chunks),)


def _logit_scale(shape: RankShape, chunks: int) -> tuple[Stream, ...]:
    """The factor of what the head's product reads, forward and backward."""
    if shape.model.logit_scale == 1:
        return ()
    return (Stream("logit scale", 4 * shape.hidden, 2 * chunks),)


def _head_bias(shape: RankShape, logits: int, chunks: int) -> tuple[Stream, ...]:
    """The gradient by the bias of scores of words: a sum over tokens."""
    if not shape.model.head_bias or shape.frozen:
        return ()
    return (Stream("lm head bias", shape.element * logits, chunks),)


def _shared_loss(shape: RankShape, chunk: int, chunks: int) -> tuple[Collective, ...]:
    """Messages between ranks about a token's loss: logsumexp and target's logit of their words."""
    if shape.tp == 1 or not shape.fused:
        return ()
    return (Collective("loss", "all_gather", 8 * shape.tp * chunk, chunks),)


def _first_losses(shape: RankShape, gemm: Gemm, chunk: int) -> tuple[Operator, ...]:
    """What tells tokens' losses before their gradients: it reads logits once, keeps nothing."""
    chunks = gemm.count
    logits = shape.tokens * gemm.n
    cap = Stream("first cap", FIRST_CAP_PASSES * shape.element * logits, 3 * chunks)
    capped = () if shape.model.logit_cap is None else (cap,)
    return (
        replace(gemm, name="lm head first"),
        Stream("first loss", shape.element * logits, chunks),
        *capped,
        Stream("first norm", 2 * shape.hidden, chunks),
        *into_matrix(shape, "lm head first", chunks),
        *_shared_loss(shape, chunk, chunks),
    )


def _workspace(shape: RankShape, logits: int, gradients: int) -> int:
    """Bytes of a chunk's logits and what its loss makes of them, with gradients beside them."""
    capped = bool(_cap(shape, logits, 1))
    if _loss_in_place(shape):
        return logits * shape.element * (2 if capped else 1) + gradients
    # Logits in the compute dtype, their fp32 copy and the log-softmax live at once. In the
    # backward the log-softmax, its gradient and the logits' gradient, all fp32, live before any
    # other gradient. A CPU run showed 12.0 bytes a logit, whatever the compute dtype.
    per_logit = 12 if shape.element == 4 else shape.element + 8
    return max(logits * per_logit + gradients, (20 if capped else 12) * logits)


def head(shape: RankShape, chunk: int) -> LayerKind:
    """The loss layer: its forward does nothing, its backward runs both on chunks of tokens."""
    model, tokens, tensors = shape.model, shape.tokens, local_tensors(shape, "head")
    table = Tensor("lm_head.weight", -(-model.vocab // shape.tp), model.hidden)
    written = (*tensors, table) if model.tied_embeddings else tensors
    if shape.frozen:
        written = ()
    chunks = -(-tokens // chunk)
    gemm = Gemm("lm head", chunk, table.rows, model.hidden, count=chunks)
    logits = chunk * table.rows
    first = _first_losses(shape, gemm, chunk) if _of_pairs(shape) else ()
    products = by_input((gemm,)) if shape.frozen else by_input_and_weight((gemm,))
    add = gradient_sum(shape, written)
    return LayerKind(
        name="head",
        tensors=tensors,
        scaled=shape.scaled,
        forward=(),
        backward=(
            *first,
            gemm,
            *products,
            _loss(shape, tokens * table.rows, 2 * chunks),
            *_cap(shape, tokens * table.rows, chunks),
            Stream("final norm", 5 * shape.hidden, launches=3),
            *_logit_scale(shape, chunks),
            *_head_bias(shape, tokens * table.rows, chunks),
            *(
                Stream(add.name, chunks * add.nbytes, chunks * add.launches, add.eager)
                for _ in written[:1]
            ),
            *into_matrix(shape, "lm head", chunks),
            *out_of_matrix(shape, "lm head", chunks, beside="lm head by weight"),
            *_shared_loss(shape, chunk, chunks),
        ),
        frozen=shape.frozen,
        saved=0,
        boundary=0,
        reruns={},
        forward_workspace=0,
        backward_workspace=_workspace(shape, logits, new_gradients(shape, written))
        + 3 * shape.whole_hidden
        + (PAIR_BYTES * tokens * shape.strategy.cp if first else 0),
        largest=logits * (shape.element if _loss_in_place(shape) else 4),
        stores_activations=False,
    )
