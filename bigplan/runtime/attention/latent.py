"""Queries, keys and values of latent attention (bigplan/spec/latent.py), for kernels of attention.

Rope turns a head's last columns. Queries are turned where the product has written them, since
nobody saves that product's result; their gradients likewise. A key is the plain columns of its head
and the turned ones that all heads share, in one tensor, because kernels of attention take no other.
With generated kernels bigplan/kernels/handwritten/turning.py does both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel
from bigplan.spec.model import ModelSpec

Parameters = Mapping[str, Tensor]
Linears = Callable[[Parameters, tuple[str, ...], Tensor], tuple[Tensor, ...]]  # as blocks' has it


class Whole(NamedTuple):
    """How a block runs what tensor-parallel ranks do not share out."""

    ranks: TensorParallel = ONE
    linears: Linears | None = None  # products with whole matrices; None: by the block's `linears`
    # Adds a product with such a matrix, as Products.closing; None: by `linears`.
    closing: Callable[..., Tensor] | None = None


class How(NamedTuple):
    """How a block runs what makes its heads."""

    linears: Linears  # products with matrices that ranks split by rows
    whole: Whole
    norm: Callable[[str, Tensor], Tensor]  # of a latent, by the norm's name
    # Products of a latent whose results are not kept, and what is told how keys are made of them;
    # None: keys and values are kept.
    again: tuple[Linears, Callable[..., None]] | None = None
    by_kernel: bool = False  # columns are turned, and keys put together, by kernels of their own


class Angles(NamedTuple):
    """Cos and sin [s, r / 2] of every position, and which of r columns turn together."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    by_kernel: bool = False

    def turn_(self, x: Tensor, *, back: bool = False) -> None:
        """Turn x [b, s, heads, r] in place, or back."""
        if self.by_kernel:
            from bigplan.kernels.handwritten import turning

            turning.turn_(x, self.cos, self.sin, interleaved=self.interleaved, back=back)
            return
        half = x.shape[-1] // 2
        first, second = (
            (x[..., ::2], x[..., 1::2]) if self.interleaved else (x[..., :half], x[..., half:])
        )
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        if back:
            sin = -sin
        turned = (first * cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).addcmul_(first, sin)
        first.copy_(turned)


class _Queries(Function):
    """Heads [b, s, heads, d] whose last columns are turned in place; saves tables only.

    All of them may grow with their position, by factors [s].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, angles: Angles, growth: Tensor | None) -> Tensor:
        ctx.angles, ctx.growth = angles, growth
        angles.turn_(_last(q, angles))
        if growth is not None:
            q.mul_(growth[:, None, None])
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (gradient,) = gradients  # of attention, which nobody else reads
        ctx.angles.turn_(_last(gradient, ctx.angles), back=True)
        if ctx.growth is not None:
            gradient.mul_(ctx.growth[:, None, None])
        return gradient, None, None


class _Keys(Function):
    """Plain columns [b, s, heads, p] beside shared ones [b, s, r], turned: [b, s, heads, p + r]."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, shared: Tensor, angles: Angles) -> Tensor:
        ctx.angles, ctx.shape = angles, shared.shape
        return _joined(angles, plain, shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        (gradient,), angles = gradients, ctx.angles
        if angles.by_kernel:
            from bigplan.kernels.handwritten import turning

            by_plain, by_shared = turning.parted(
                gradient, angles.cos, angles.sin, interleaved=angles.interleaved
            )
            return by_plain, by_shared.view(ctx.shape), None
        by_shared = _last(gradient, angles).sum(2, keepdim=True)
        angles.turn_(by_shared, back=True)
        width = gradient.shape[-1] - by_shared.shape[-1]
        by_plain = gradient[..., :width].contiguous()
        return by_plain, by_shared.view(ctx.shape), None


def _joined(angles: Angles, plain: Tensor, shared: Tensor) -> Tensor:
    """Keys, without a graph."""
    if angles.by_kernel:
        from bigplan.kernels.handwritten import turning

        return turning.joined(plain, shared, angles.cos, angles.sin, interleaved=angles.interleaved)
    turned = shared.unsqueeze(2).clone()
    angles.turn_(turned)
    width = plain.shape[-1]
    whole = plain.new_empty(*plain.shape[:-1], width + shared.shape[-1])
    whole[..., :width].copy_(plain)
    whole[..., width:].copy_(turned)
    return whole


def _last(heads: Tensor, angles: Angles) -> Tensor:
    """The columns that rope turns."""
    return heads[..., -2 * angles.cos.shape[-1] :]


def turned(q: Tensor, angles: Angles, growth: Tensor | None = None) -> Tensor:
    """Queries [b, s, heads, d], whose last columns are turned in place, times factors [s]."""
    return _Queries.apply(q, angles, growth)  # type: ignore[no-any-return, no-untyped-call]


def keys(plain: Tensor, shared: Tensor, angles: Angles) -> Tensor:
    """Keys [b, s, heads, p + r] of plain columns [b, s, heads, p] and shared ones [b, s, r]."""
    return _Keys.apply(plain, shared, angles)  # type: ignore[no-any-return, no-untyped-call]


def heads(
    p: Parameters, x: Tensor, model: ModelSpec, tables: tuple[Tensor, ...], how: How
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [b, s, heads, plain_dim + rope_dim] and values [b, s, heads, value_dim].

    x is the normed residual stream as a rank has it; `tables`: position_tables'.
    """
    latent, linears = model.latent_attention, how.linears
    assert latent is not None, model.name
    whole, narrow = how.whole.linears or linears, ("kv_a_proj", "k_rope_proj")
    if latent.query_rank is None:
        (q,) = linears(p, ("q_proj",), x)
        pair, shared = whole(p, narrow, x)
    else:
        own, pair, shared = whole(p, ("q_a_proj", *narrow), x)
        (q,) = linears(p, ("q_b_proj",), how.norm("q_a_norm", own))
    products = how.again[0] if how.again else linears
    plain, v = products(p, ("k_b_proj", "v_b_proj"), how.norm("kv_a_norm", pair))
    length = len(tables[0])
    angles = Angles(tables[0], tables[1], latent.interleaved, how.by_kernel)
    shared = how.whole.ranks.gathered(shared).view(-1, length, latent.rope_dim)
    q, plain, v = (
        y.view(-1, length, y.shape[-1] // width, width)
        for y, width in ((q, latent.head_dim), (plain, latent.plain_dim), (v, latent.value_dim))
    )
    k = keys(plain, shared, angles)
    if how.again:
        how.again[1](k, partial(_joined, angles), plain, shared)
    return turned(q, angles, *tables[2:]), k, v
