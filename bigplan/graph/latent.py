"""Latent attention on one rank: what its ranks exchange, and what it moves and takes besides.

Tensor-parallel ranks gather latents, where other attention gathers the residual stream. Each value
is gathered before the products that make heads of it. The gradients by it are summed.
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.graph.attention_kernels import pads_values
from bigplan.graph.operators import Collective, Pattern, Stream
from bigplan.graph.shape import RankShape
from bigplan.graph.sums import into_matrix, out_of_matrix
from bigplan.spec.latent_heads import HEADS, KEYS, LATENTS
from bigplan.spec.step import LayerStep, StepOp, StepValue

# Passes over the columns that rope turns in place, as plain torch kernels: five kernels, of which
# three read or write every second column and so move both (runtime/attention/latent.py). A kernel
# by hand makes two (kernels/handwritten/turning.py).
TURNING_PASSES, TURNING_KERNELS = 10, 5


def into_heads(shape: RankShape, again: str = "") -> tuple[Collective, ...]:
    """Before the products that make heads: with sequence parallelism what they read is gathered.

    `again`: a word after the names of those of the backward, which gathers inputs that are kept.
    """
    if shape.model.latent_attention is None:
        (qkv, *_) = shape.steps(StepOp.PRODUCT)
        named = f"attention input {again}".strip()
        return into_matrix(shape, named) if qkv.saves or not again else ()
    if not shape.sequence_parallel:
        return ()
    read = [step.reads[0] for step in _of_heads(shape) if step.saves or not again]
    read += [] if again else [_rope_key(shape)]
    return tuple(
        Collective(f"{value.name} gather {again}".strip(), "all_gather", _whole(shape, value))
        for value in read
    )


def out_of_heads(shape: RankShape) -> tuple[Collective, ...]:
    """In the backward: sums over ranks of the gradients by what was gathered."""
    if shape.model.latent_attention is None:
        return out_of_matrix(shape, "attention input", beside="query, key, value by weight")
    if shape.tp == 1:
        return ()
    pattern: Pattern = "reduce_scatter" if shape.sequence_parallel else "all_reduce"
    besides = {step.reads[0]: f"{step.name} by weight" for step in _of_heads(shape)}
    besides[_rope_key(shape)] = ""
    return tuple(
        Collective(f"{value.name} sum", pattern, _whole(shape, value), beside=beside)
        for value, beside in besides.items()
    )


def _of_heads(shape: RankShape) -> Iterator[LayerStep]:
    """The products that give values of heads, of which ranks have some each."""
    for step in shape.steps(StepOp.PRODUCT):
        if step.name == "attention output":
            return
        if step.name != LATENTS:
            yield step


def _rope_key(shape: RankShape) -> StepValue:
    *_, join = shape.steps(StepOp.ROTARY)
    return join.reads[-1]


def _whole(shape: RankShape, value: StepValue) -> int:
    """Bytes of a value that belongs to the residual stream, of all tokens."""
    return shape.tokens * value.columns() * shape.element


def turned(shape: RankShape, step: LayerStep) -> tuple[Stream, Stream]:
    """Queries turned in place, or keys put together; the gradients by them, the other way."""
    latent = shape.model.latent_attention
    assert latent is not None
    heads = shape.activation_shape.nbytes(StepValue("", shape.model.heads))  # of a column each
    joins, passes = step.name == KEYS, 2 if shape.generated else TURNING_PASSES
    columns = 2 * latent.plain_dim + latent.rope_dim if joins else passes * latent.rope_dim
    launches = 1 if shape.generated else TURNING_KERNELS + 3 * joins
    scaling, length = shape.model.rope_scaling, shape.training.sequence_length
    if not joins and scaling is not None and scaling.grows_within(length):
        columns, launches = columns + 2 * latent.head_dim, launches + 1
    one = Stream(step.name, columns * heads, launches, generated=shape.generated)
    return one, one


def made_again(shape: RankShape) -> tuple[tuple[Collective, ...], int]:
    """What a second run of keys and values gathers, and the bytes that are kept for it.

    Ranks that exchange heads keep what came, and run nothing again.
    """
    if shape.model.latent_attention is None or shape.cp > 1:
        return (), 0
    gathers = list[Collective]()
    if shape.sequence_parallel:
        (latent,) = (step.reads[0] for step in _of_heads(shape) if step.name == HEADS)
        gathers.append(Collective(f"{latent.name} gather", "all_gather", _whole(shape, latent)))
    return tuple(gathers), _whole(shape, _rope_key(shape))


def runs_again(shape: RankShape, step: LayerStep) -> bool:
    """Whether selective recomputation may run this cheap step again."""
    return shape.cp == 1 or step.name not in (HEADS, KEYS)


def forward_bytes(shape: RankShape) -> int:
    """Bytes that a forward takes beside what it saves: plain keys, or values that are padded."""
    latent = shape.model.latent_attention
    if latent is None:
        return 0
    of_plain = shape.tokens * -(-shape.model.heads // shape.tp) * latent.plain_dim
    padded = 2 * shape.mixed_tokens * shape.heads * latent.head_dim if pads_values(shape) else 0
    return max(of_plain, padded) * shape.element


def backward_bytes(shape: RankShape) -> int:
    """The same within attention's backward: values, the result and gradients by both, padded.

    Of keys and values that selective recomputation makes again the way to recompute counts the
    bytes (`LayerKind.workspace`). Their plain columns need no room beside: those that keys are made
    of are gone before there are gradients, and gradients by them come when the fp32 sums of
    gradients by queries (`flash_gradients`), which are wider, are gone.
    """
    latent = shape.model.latent_attention
    if latent is None or not pads_values(shape):
        return 0
    return 4 * latent.head_dim * shape.mixed_tokens * shape.heads * shape.element
