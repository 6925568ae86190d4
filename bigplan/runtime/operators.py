"""Norms, rotary, SwiGLU and the loss as autograd functions of plain torch operators.

They are written out, so that the tensors that autograd saves are known to the byte, and the same on
CPU and CUDA: bigplan/graph/activations.py holds the formula. On CUDA they run if `training.kernels`
is torch, and under DeepSpeed. Otherwise generated.py has kernels that save the same tensors. If
ranks share out a vocabulary (words.py), the loss has a kernel written by hand, in two parts.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

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


class _RmsNorm(Function):
    """x * rstd * weight over the last dimension, in fp32, and x; saves x and rstd (fp32 [..., 1]).

    The gradient by the second output, if any, is added to that by the first. With `over` the sum
    is written over the second output's gradient: a new tensor among a block's large ones would live
    on into the next block. A frozen weight gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, epsilon: float, over: bool = False
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.over = over
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        out = (wide * rstd * weight.float()).to(x.dtype)
        ctx.save_for_backward(x, weight, rstd)
        return out, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        by_output, beside = gradients
        gradient = by_output.float()
        normed, by_weight = x.float() * rstd, None
        if ctx.needs_input_grad[1]:
            by_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
        gradient = gradient * weight.float()
        projection = (gradient * normed).mean(-1, keepdim=True)
        by_x = rstd * (gradient - normed * projection)
        if beside is not None:
            by_x += beside
            if ctx.over:
                return beside.copy_(by_x), by_weight, None, None
        return by_x.to(x.dtype), by_weight, None, None


class _LayerNorm(Function):
    """torch's layer norm over the last dimension; saves x, mean and rstd (fp32 [..., 1])."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        wide = _fp32_on_cpu(x, weight), None if bias is None else _fp32_on_cpu(x, bias)
        output, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], *wide, epsilon)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        _, trained, biased, _ = ctx.needs_input_grad
        by_x, by_weight, by_bias = torch.ops.aten.native_layer_norm_backward(
            gradients[0].contiguous(),
            x,
            x.shape[-1:],
            mean,
            rstd,
            _fp32_on_cpu(x, weight),
            None if bias is None else _fp32_on_cpu(x, bias),
            (True, trained, biased),
        )
        found = (by_weight, by_bias)
        return by_x, *(None if each is None else each.to(weight.dtype) for each in found), None


def _fp32_on_cpu(x: Tensor, weight: Tensor) -> Tensor:
    """The CPU's layer norm keeps its statistics in the weight's dtype, CUDA's always in fp32."""
    return weight if x.is_cuda else weight.float()


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


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, without a graph."""
    return F.silu(gate).mul_(up)


def gated_backward(
    gate: Tensor, up: Tensor, gradient: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients by gate and up; gated(gate, up) goes to `out`, which may be `gradient`."""
    # torch's own derivative of silu, in fp32 inside for bf16
    by_gate: Tensor = torch.ops.aten.silu_backward(gradient * up, gate)
    silu = F.silu(gate)
    by_up = silu * gradient
    if out is not None:
        torch.mul(silu, up, out=out)
    return by_gate, by_up


class _SwiGlu(Function):
    """silu(gate) * up; saves gate and up and computes silu again in the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return gated(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gated_backward(gate, up, gradients[0])


def row_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and logsumexp of every row of logits [n, V], fp32 [n] both, without a graph.

    The loss is 0 where the target int64 [n] is negative, and the logsumexp where it is beyond V.
    """
    if kernels_for(logits):
        from bigplan.kernels import cross_entropy as kernel

        return kernel.forward(logits, targets)
    wide, columns = logits.float(), logits.shape[1]
    lse = wide.logsumexp(1)
    picked = wide.gather(1, targets.clamp(0, columns - 1)[:, None])[:, 0]
    losses = torch.where(targets < columns, lse - picked, lse)
    return losses.masked_fill_(targets < 0, 0.0), lse


def by_logits_(logits: Tensor, targets: Tensor, lse: Tensor, gradient: Tensor) -> Tensor:
    """Overwrites the logits with the gradient by them; `gradient` [n] is by row_losses's."""
    if kernels_for(logits):
        from bigplan.kernels import cross_entropy as kernel

        return kernel.backward_(logits, targets, lse, gradient)
    wide, columns = logits.float(), logits.shape[1]  # in fp32 they are the logits themselves
    wide.sub_(lse[:, None]).exp_()
    mine = (targets >= 0) & (targets < columns)
    wide.scatter_add_(1, targets.clamp(0, columns - 1)[:, None], -mine[:, None].to(wide.dtype))
    wide.mul_(torch.where(targets < 0, 0.0, gradient)[:, None])
    return logits.copy_(wide)


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, *, over: bool = False
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [..., h], and x for all others to read.

    The backward adds the gradient by that x to the norm's own gradient; with `over` it writes the
    sum over the gradient by that x.
    """
    return _RmsNorm.apply(x, weight, epsilon, over)  # type: ignore[no-any-return, no-untyped-call]


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """Torch's layer norm of x [..., h], statistics in fp32."""
    return _LayerNorm.apply(x, weight, bias, epsilon)  # type: ignore[no-any-return, no-untyped-call]


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """X [b, s, heads, d], its pairs (i, i + r/2) turned by the angles of cos and sin [s, r/2].

    Columns from r on stay as they are.
    """
    return _Rotary.apply(x, cos, sin)  # type: ignore[no-any-return, no-untyped-call]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _SwiGlu.apply(gate, up)  # type: ignore[no-any-return, no-untyped-call]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over rows of logits [n, V] by targets int64 [n]; -100 counts nothing. fp32."""
    return F.cross_entropy(logits.float(), targets, reduction="sum")
