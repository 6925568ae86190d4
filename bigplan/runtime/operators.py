"""Norms, rotary, SwiGLU and the loss as autograd functions of plain torch operators.

They are written out, so that the tensors that autograd saves are known to the byte, and the same on
CPU and CUDA: bigplan/graph/activations.py holds the formula. On CUDA they run if `training.kernels`
is torch, and under DeepSpeed. Otherwise generated.py has kernels that save the same tensors. If
ranks share out a vocabulary (parallel/words.py), the loss has a kernel written by hand, in two
parts.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bigplan.kernels.numbers import from_host, to_host
from bigplan.runtime.constants import values_of

GateKind = Literal["swiglu", "geglu"]
_left_out = False


def leave_triton_out() -> None:
    """Run no Triton kernel in this process from now on: loaded libraries break their compiler."""
    global _left_out  # noqa: PLW0603 -- it is the process that it is true of
    _left_out = True


@cache
def has_triton() -> bool:
    """Whether Triton's kernels can be compiled."""
    return find_spec("triton") is not None


def kernels_for(x: Tensor) -> bool:
    """Whether the loss by hand runs on this tensor: on CUDA, where Triton is installed."""
    return x.is_cuda and has_triton() and not _left_out


def numbers_of(counts: Tensor) -> list[int]:
    """Integers [n], for which the CPU waits."""
    return to_host(counts) if kernels_for(counts) else counts.tolist()


def numbers_on(device: torch.device, numbers: Tensor) -> Tensor:
    """A copy, on a device, of contiguous numbers in host memory that is page-locked for it."""
    if device.type == "cuda" and has_triton() and not _left_out:
        return from_host(numbers, device)
    return numbers.to(device, non_blocking=True, copy=True)


def wide(x: Tensor) -> Tensor:
    """In fp32, or wider where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RmsRule(NamedTuple):
    """What an RMSNorm adds to the mean of squares, and whether it multiplies by 1 + weight."""

    epsilon: float
    plus_one: bool = False

    def factors(self, weight: Tensor | None) -> Tensor | float:
        """What it multiplies by, fp32; without a weight, 1."""
        if weight is None:
            return 1.0
        return weight.float() + 1.0 if self.plus_one else weight.float()


class _RmsNorm(Function):
    """x * rstd * weight over the last dimension, in fp32, and x; saves x and rstd (fp32 [..., 1]).

    The gradient by the second output, if any, is added to that by the first. With `over` the sum
    is written over the second output's gradient: a new tensor among a block's large ones would live
    on into the next block. A frozen weight gets no gradient, and there may be none.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, rule: RmsRule, over: bool = False
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.rule, ctx.over = rule, over
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + rule.epsilon)
        out = (wide * rstd * rule.factors(weight)).to(x.dtype)
        ctx.save_for_backward(x, weight, rstd)
        return out, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        by_output, beside = gradients
        gradient = by_output.float()
        normed, by_weight = x.float() * rstd, None
        if weight is not None and ctx.needs_input_grad[1]:
            by_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
        gradient = gradient * ctx.rule.factors(weight)
        projection = (gradient * normed).mean(-1, keepdim=True)
        by_x = rstd * (gradient - normed * projection)
        if beside is not None:
            by_x += beside
            if ctx.over:
                return beside.copy_(by_x), by_weight, None, None
        return by_x.to(x.dtype), by_weight, None, None


class _LayerNorm(Function):
    """torch's layer norm over the last dimension; saves x, mean and rstd (fp32 [..., 1]).

    With `plus_one` it multiplies by 1 + weight, without a weight by nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        plus_one: bool,
    ) -> Tensor:
        ctx.plus_one = plus_one
        wide = _factors(x, weight, plus_one), None if bias is None else _fp32_on_cpu(x, bias)
        output, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], *wide, epsilon)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        _, trained, biased, *_ = ctx.needs_input_grad
        by_x, by_weight, by_bias = torch.ops.aten.native_layer_norm_backward(
            gradients[0].contiguous(),
            x,
            x.shape[-1:],
            mean,
            rstd,
            _factors(x, weight, ctx.plus_one),
            None if bias is None else _fp32_on_cpu(x, bias),
            (True, trained, biased),
        )
        found = (by_weight, by_bias)
        by_weights = (None if each is None else each.to(x.dtype) for each in found)
        return by_x, *by_weights, None, None


def _fp32_on_cpu(x: Tensor, weight: Tensor) -> Tensor:
    """The CPU's layer norm keeps its statistics in the weight's dtype, CUDA's always in fp32."""
    return weight if x.is_cuda else weight.float()


def _factors(x: Tensor, weight: Tensor | None, plus_one: bool) -> Tensor | None:
    """By which it multiplies: without a weight by ones where the CPU would keep 16 bits."""
    if weight is None:
        in_fp32 = x.is_cuda or x.element_size() >= 4
        return None if in_fp32 else torch.ones(x.shape[-1])
    wide = _fp32_on_cpu(x, weight)
    return wide + 1.0 if plus_one else wide


class _Rotary(Function):
    """Rotates pairs of columns of x [b, s, heads, d]; saves cos and sin only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(gradients[0], cos, -sin), None, None  # a rotation's transpose


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rotary() in plain torch, without a graph."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*turned, rest), dim=-1).to(x.dtype)


def gated(gate: Tensor, up: Tensor, kind: GateKind = "swiglu") -> Tensor:
    """silu(gate) * up, or of geglu gelu(gate) * up, without a graph."""
    return _opened(gate, kind).mul_(up)


def _opened(gate: Tensor, kind: GateKind) -> Tensor:
    return F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")


def gated_backward(
    gate: Tensor,
    up: Tensor,
    gradient: Tensor,
    out: Tensor | None = None,
    kind: GateKind = "swiglu",
) -> tuple[Tensor, Tensor]:
    """Gradients by gate and up; gated(gate, up) goes to `out`, which may be `gradient`."""
    # torch's own derivatives, in fp32 inside for bf16
    if kind == "swiglu":
        by_gate: Tensor = torch.ops.aten.silu_backward(gradient * up, gate)
    else:
        by_gate = torch.ops.aten.gelu_backward(gradient * up, gate, approximate="tanh")
    opened = _opened(gate, kind)
    by_up = opened * gradient
    if out is not None:
        torch.mul(opened, up, out=out)
    return by_gate, by_up


class _GatedActivation(Function):
    """silu(gate) * up, or with gelu; saves gate and up and computes the former again."""

    @staticmethod
    def forward(ctx: Any, kind: GateKind, gate: Tensor, up: Tensor) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        return gated(gate, up, kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return None, *gated_backward(gate, up, gradients[0], kind=ctx.kind)


class _SquaredRelu(Function):
    """relu(x)^2; saves x and computes relu again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(gradients[0]).mul_(2.0)


class _UnreadSum(Function):
    """Stands for x + scale * y if the backward alone is wanted: all elements are the same one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.new_empty(()).expand_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        by_sum = gradients[0]
        return by_sum, by_sum if ctx.scale == 1 else by_sum * ctx.scale, None


class _Scaled(Function):
    """x times a constant, over x; `unread`: for its backward alone, as _UnreadSum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, terms: Tensor, unread: bool) -> Tensor:
        ctx.save_for_backward(terms)
        if unread:
            return x.new_empty(()).expand_as(x)
        ctx.mark_dirty(x)
        return x.mul_(values_of(terms).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (terms,) = ctx.saved_tensors
        return gradients[0] * values_of(terms).to(gradients[0].dtype), None, None


class _Cap(Function):
    """cap * tanh(x / cap); saves its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        out = (x / cap).tanh_().mul_(cap)
        ctx.save_for_backward(out)
        ctx.cap = cap
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return gradients[0] * (1.0 - (out / ctx.cap).square_()), None


def row_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and logsumexp of every row of logits [n, V], fp32 [n] both, without a graph.

    The loss is 0 where the target int64 [n] is negative, and the logsumexp where it is beyond V.
    """
    if kernels_for(logits):
        from bigplan.kernels.handwritten import cross_entropy as kernel

        return kernel.forward(logits, targets)
    wide, columns = logits.float(), logits.shape[1]
    lse = wide.logsumexp(1)
    picked = wide.gather(1, targets.clamp(0, columns - 1)[:, None])[:, 0]
    losses = torch.where(targets < columns, lse - picked, lse)
    return losses.masked_fill_(targets < 0, 0.0), lse


def by_logits_(logits: Tensor, targets: Tensor, lse: Tensor, gradient: Tensor) -> Tensor:
    """Overwrites the logits with the gradient by them; `gradient` [n] is by row_losses's."""
    if kernels_for(logits):
        from bigplan.kernels.handwritten import cross_entropy as kernel

        return kernel.backward_(logits, targets, lse, gradient)
    wide, columns = logits.float(), logits.shape[1]  # in fp32 they are the logits themselves
    wide.sub_(lse[:, None]).exp_()
    mine = (targets >= 0) & (targets < columns)
    wide.scatter_add_(1, targets.clamp(0, columns - 1)[:, None], -mine[:, None].to(wide.dtype))
    wide.mul_(torch.where(targets < 0, 0.0, gradient)[:, None])
    return logits.copy_(wide)


def rms_norm(
    x: Tensor, weight: Tensor | None, rule: RmsRule, *, over: bool = False
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [..., h], by weight [h] or none, and x for all others to read.

    The backward adds the gradient by that x to the norm's own gradient; with `over` it writes the
    sum over the gradient by that x.
    """
    return _RmsNorm.apply(x, weight, rule, over)  # type: ignore[no-any-return, no-untyped-call]


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = 1e-5,
    *,
    plus_one: bool = False,
) -> Tensor:
    """Torch's layer norm of x [..., h], statistics in fp32, by weight or by 1 + weight."""
    return _LayerNorm.apply(x, weight, bias, epsilon, plus_one)  # type: ignore[no-any-return, no-untyped-call]


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """X [b, s, heads, d], its pairs (i, i + r/2) turned by the angles of cos and sin [s, r/2].

    Columns from r on stay as they are.
    """
    return _Rotary.apply(x, cos, sin)  # type: ignore[no-any-return, no-untyped-call]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _GatedActivation.apply("swiglu", gate, up)  # type: ignore[no-any-return, no-untyped-call]


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, by gelu's tanh approximation."""
    return _GatedActivation.apply("geglu", gate, up)  # type: ignore[no-any-return, no-untyped-call]


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2."""
    return _SquaredRelu.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def unread_sum(x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
    """X + scale * y for its backward: nobody may read what it gives."""
    return _UnreadSum.apply(x, y, scale)  # type: ignore[no-any-return, no-untyped-call]


def scaled_in_place(x: Tensor, terms: Tensor, *, unread: bool = False) -> Tensor:
    """X times the constant of these terms [3, 1], over x, which nobody else may read.

    With `unread` nobody may read what it gives.
    """
    return _Scaled.apply(x, terms, unread)  # type: ignore[no-any-return, no-untyped-call]


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Cap * tanh(x / cap), without a cap x itself."""
    return x if cap is None else _Cap.apply(x, cap)  # type: ignore[no-untyped-call]


def cross_entropy(logits: Tensor, targets: Tensor, cap: float | None = None) -> Tensor:
    """Sum over rows of logits [n, V], capped, by targets int64 [n]; -100 counts nothing. fp32."""
    return F.cross_entropy(capped(logits.float(), cap), targets, reduction="sum")
