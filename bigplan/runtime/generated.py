"""Norms, activations, positions and the loss by generated kernels, as autograd functions.

They save what the functions of operators.py save, so that a plan's memory is the same either way.
But one pass does more. The backward of a layer norm, as of an RMSNorm, adds the other gradient of
its input. A sum of the residual stream and the norm that reads the sum are one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.cpu.native import Piece
from bigplan.runtime.experts.activations import Activation
from bigplan.runtime.experts.dispatch import Places, RowOperators
from bigplan.runtime.experts.grouped_eight_bits import EightBitExperts
from bigplan.runtime.linear import four_bits
from bigplan.runtime.linear.dropout import Dropping, dropped
from bigplan.runtime.linear.eight_bits import EightBits
from bigplan.runtime.linear.matrices import AS_STORED, Matrices, Opened
from bigplan.spec.training import Training

if TYPE_CHECKING:
    from bigplan.kernels.fusion.single import ActivationKind, NormKind
    from bigplan.kernels.library import Library
    from bigplan.kernels.update import AdamW


def library_for(training: Training, device: torch.device) -> Library | None:
    """The kernels that a training asks for; None: torch's operators, as everywhere but on CUDA."""
    return _library() if training.kernels == "generated" and runs_kernels(device) else None


def runs_kernels(device: torch.device) -> bool:
    """Whether generated kernels run on tensors of that device."""
    return device.type == "cuda"


def sized_as(training: Training, device: torch.device) -> str:
    """What to tell of kernels sized for another GPU than this one; empty where there is nothing."""
    library, reported = library_for(training, device), torch.cuda.get_device_name(device)
    if library is None or library.pricer.gpu.name == reported:
        return ""
    return (
        f"the multiprocessors of {reported!r} are not described: generated kernels are sized as on "
        f"{library.pricer.gpu.name}, the closest; they compute the same"
    )


@cache
def _library() -> Library:
    from bigplan.kernels.library import Library
    from bigplan.kernels.optimised import Optimiser

    return Library(Optimiser(None, 0.0).pricer)


def unpacked_by(library: Library | None) -> Callable[[Tensor], Tensor]:
    """What makes matrices of weights in 4 bits."""
    if library is None:
        return four_bits.unpacked
    from bigplan.kernels.handwritten.four_bits import unpacked

    return unpacked


def dropping_by(library: Library | None) -> Dropping:
    """What drops elements of what adapters read."""
    if library is None:
        return dropped
    from bigplan.kernels.handwritten import dropout

    return dropout.dropped


def eight_bits_by(library: Library | None) -> EightBits:
    """Products in 8 bits, and what casts to them."""
    if library is None:
        return EightBits()
    from bigplan.kernels.handwritten.eight_bits import cast
    from bigplan.kernels.handwritten.expert_casts import by_column, by_row

    return EightBits(cast, EightBitExperts(by_row, by_column))


def matrices_for(training: Training, library: Library | None) -> Matrices:
    """How a block's products multiply."""
    if training.fp8_gemms:
        return eight_bits_by(library)
    if training.lora is not None and training.lora.frozen is not None:
        return Opened(unpacked_by(library))
    return AS_STORED


def adamw_for(training: Training, device: torch.device) -> AdamW | None:
    """The update's kernel on the device, if the training asks for generated kernels.

    Moments that are not in fp32 have one of their own (runtime/optimizer/narrow_update.py).
    """
    if training.optimizer.name == "sgd" or training.optimizer.moments != "fp32":
        return None
    library = library_for(training, device)
    if library is None:
        return None
    from bigplan.kernels.update import AdamW

    return AdamW(library.pricer)


def adamw_step(kernel: AdamW, factors: Tensor, pieces: Sequence[Piece]) -> None:
    """As fused.fused_step, of pieces on a GPU: one kernel a piece, and gradients stay.

    `factors`: of AdamW.factors.
    """
    for piece in pieces:
        for start in range(0, piece.elements, kernel.most):
            part = piece.part(start, min(start + kernel.most, piece.elements))
            first, second = part.state
            kernel.step(part.parameter, part.gradient, (first, second), part.copy, factors)


class NormRule(NamedTuple):
    """What a norm over the last dimension is, and what runs it."""

    library: Library
    kind: NormKind
    epsilon: float


class _Norm(Function):
    """A norm over the last dimension, and x; saves x and its statistics (fp32 [..., 1] each).

    The gradient by the second output, if any, is added to that by the first; `over`: in its place.
    """

    @staticmethod
    def forward(ctx: Any, rule: NormRule, over: bool, *given: Any) -> tuple[Tensor, Tensor]:
        x, weight, bias = given
        ctx.set_materialize_grads(False)
        ctx.rule, ctx.over, ctx.biased = rule, over, bias is not None
        ctx.frozen = not ctx.needs_input_grad[3]
        out, *statistics = rule.library.norm(rule.kind, x, _of(x, weight), bias, rule.epsilon)
        ctx.save_for_backward(x, weight, *statistics)
        return out, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        by_x, *by_weights = _norm_gradients(ctx, *gradients, over=ctx.over)
        return None, None, by_x, *by_weights


def _of(x: Tensor, weight: Tensor | None) -> Tensor:
    """A norm's weight; where it has none, ones, which no one keeps."""
    return x.new_ones(x.shape[-1]) if weight is None else weight


def _norm_gradients(ctx: Any, by_out: Tensor, beside: Tensor | None, *, over: bool) -> list[Any]:
    """Gradients by x, weight and bias: None where there is none, or where they are frozen."""
    x, weight, *statistics = ctx.saved_tensors
    library, kind, _ = ctx.rule
    names = ("mean", "rstd")[-len(statistics) :]
    named = {"gradient": by_out, "x": x, "weight": _of(x, weight)}
    named |= dict(zip(names, statistics, strict=True))
    found = library.norm_backward(
        kind, named, beside, biased=ctx.biased, frozen=ctx.frozen, over=over
    )
    return [*found, *[None] * (3 - len(found))]


class _AddedNorm(Function):
    """The norm of x + y, and x + y, which takes the memory of y; saves it and its statistics."""

    @staticmethod
    def forward(ctx: Any, rule: NormRule, *given: Any) -> tuple[Tensor, Tensor]:
        x, y, weight, bias = given
        ctx.set_materialize_grads(False)
        ctx.rule, ctx.biased, ctx.frozen = rule, bias is not None, not ctx.needs_input_grad[3]
        found = rule.library.added_norm(rule.kind, x, y, _of(x, weight), bias, rule.epsilon)
        out, *statistics, total = found
        ctx.save_for_backward(total, weight, *statistics)
        return out, total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        by_sum, *by_weights = _norm_gradients(ctx, *gradients, over=False)
        return None, by_sum, by_sum, *by_weights


class _Activation(Function):
    """GELU, ReLU, SwiGLU or GeGLU; saves its inputs, a ReLU its output."""

    @staticmethod
    def forward(ctx: Any, library: Library, kind: ActivationKind, *inputs: Tensor) -> Tensor:
        out = library.activation(kind, *inputs)
        ctx.library, ctx.kind = library, kind
        ctx.save_for_backward(*([out] if kind == "relu" else inputs))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        found = ctx.library.activation_backward(ctx.kind, gradients[0], *ctx.saved_tensors)
        return None, None, *found


class _GeneratedRotary(Function):
    """Rotates pairs of columns of x [b, s, heads, d]; saves cos and sin only."""

    @staticmethod
    def forward(ctx: Any, library: Library, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.library = library
        ctx.save_for_backward(cos, sin)
        return library.rotary(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return None, ctx.library.rotary(gradients[0], cos, sin, back=True), None, None


class LossRule(NamedTuple):
    """What runs the loss, the factor of its gradient (one fp32 element), and logits' cap."""

    library: Library
    scale: Tensor
    cap: float | None = None


class _CrossEntropy(Function):
    """Sum of the losses of logits [n, V], whose memory has their gradient when it is known."""

    @staticmethod
    def forward(ctx: Any, rule: LossRule, logits: Tensor, targets: Tensor) -> Tensor:
        losses = rule.library.cross_entropy_(logits, targets, rule.scale, rule.cap)
        ctx.save_for_backward(logits)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (by_logits,) = ctx.saved_tensors
        return None, by_logits, None


def norm(
    rule: NormRule,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    over: bool = False,
) -> tuple[Tensor, Tensor]:
    """A norm of x [..., h], and x for all others to read, as operators.rms_norm has it."""
    return _Norm.apply(rule, over, x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def normed(rule: NormRule, x: Tensor, *weights: Tensor | None) -> Tensor:
    """The norm of x alone, by weight and bias where it has them."""
    return norm(rule, x, *weights)[0]


def added_norm(
    rule: NormRule, x: Tensor, y: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of x + y, and x + y; nobody else may read y, which it is written over."""
    return _AddedNorm.apply(rule, x, y, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def activation(library: Library, kind: ActivationKind, *inputs: Tensor) -> Tensor:
    """The activation of x [..., f], or of a gate and up."""
    return _Activation.apply(library, kind, *inputs)  # type: ignore[no-any-return, no-untyped-call]


def rotary(library: Library, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As operators.rotary."""
    return _GeneratedRotary.apply(library, x, cos, sin)  # type: ignore[no-any-return, no-untyped-call]


def rows_of(library: Library | None) -> RowOperators:
    """What passes over rows of experts, by its kernels where there is a library."""
    if library is None:
        return RowOperators()
    from bigplan.kernels.handwritten import rows, weighted_rows

    def sent(x: Tensor, places: Places) -> Tensor:
        return rows.sent(x, places.order, places.chosen.shape[1])

    def combined(given: Tensor, places: Places, beside: Tensor | None = None) -> Tensor:
        return rows.combined(given, beside, places.rows, len(places.chosen))

    def activation(kind: str, weighs: str) -> Activation:
        inputs = weighs == "inputs"
        return Activation(
            partial(weighted_rows.weighted, kind=kind, inputs=inputs),
            partial(weighted_rows.weighted_backward, kind=kind, inputs=inputs),
        )

    return RowOperators(sent, combined, rows.put, activation)


def cross_entropy(rule: LossRule, logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over rows of logits [n, V] by targets int64 [n]; a negative one counts nothing. fp32.

    One kernel writes the gradient over the logits at once. So the factor of the gradient must be
    known by then; the gradient that autograd brings is ignored.
    """
    return _CrossEntropy.apply(rule, logits, targets)  # type: ignore[no-any-return, no-untyped-call]


def scale_of(value: float, device: torch.device) -> Tensor:
    """A factor as kernels read it."""
    return torch.full((1,), value, dtype=torch.float32, device=device)
