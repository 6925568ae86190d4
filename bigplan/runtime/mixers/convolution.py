"""The gated short convolution of bigplan/spec/mixers.py, as a sum of shifted products.

With u = b v and a channel's n weights w, token t of the result is c_t (bias + sum over i of
w_{n-1-i} u_{t-i}). A token before the sequence, or before the token's document where documents are
kept apart, counts as zero. Context-parallel ranks each get the last n - 1 tokens of u from the rank
before. These and the three vectors alone are saved; the backward makes u and the sum again. A GPU's
generated kernels do the same of whole sequences in 16 bits
(bigplan/kernels/handwritten/gated_filters.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.mechanics import convolution_in_kernels
from bigplan.runtime.mixers.positions import Positions
from bigplan.runtime.mixers.ways import Parameters, Ways
from bigplan.runtime.parallel.context_parallel import WHOLE, ContextParallel
from bigplan.runtime.parallel.group import RankGroup
from bigplan.spec.convolution_steps import AFTER, BEFORE, FILTERS, FILTERS_BIAS, VALUE
from bigplan.spec.model import ModelSpec


class Where(NamedTuple):
    """Which tokens of a sequence a rank has, and where documents begin that are kept apart."""

    context: ContextParallel = WHOLE
    begins: Tensor | None = None  # of each token of whole sequences, int32 [b, s]

    def reaches(self, back: int, length: int) -> Tensor | None:
        """Whether the token so many places before is of the same document, [b, length, 1].

        None: it always is.
        """
        if self.begins is None or not back:
            return None
        first = self.context.first(length)
        places = torch.arange(first, first + length, device=self.begins.device)
        return (places - back >= self.begins[:, first : first + length])[..., None]


def mixed(p: Parameters, x: Tensor, model: ModelSpec, positions: Positions, ways: Ways) -> Tensor:
    """What the convolution makes of x, the normed residual stream, before its last product.

    `positions` tell how many tokens of a sequence this rank has, and where documents begin.
    """
    conv, length = model.convolution, len(positions.tables[0])
    assert conv is not None, model.name
    products = ways.linears(p, (BEFORE, AFTER, VALUE), x)
    before, after, value = (y.view(-1, length, y.shape[-1]) for y in products)
    bounds = positions.bounds
    where = Where(ways.context, None if bounds is None else bounds[:, 0])
    inputs = [before, after, value, p[FILTERS], *([p[FILTERS_BIAS]] if conv.bias else ())]
    past = _past(before, value, conv.taps - 1, ways.context.group)
    fused = ways.kernels is not None and past is None and bounds is None
    if fused and convolution_in_kernels(x.element_size(), conv.taps):
        convolve: Callable[..., Tensor] = _in_kernels
    else:
        convolve = partial(_convolved, where, past is not None)
    inputs += [] if past is None else [past]
    output = convolve(*inputs)
    ways.forget(output, convolve, *inputs)
    return output


def _in_kernels(*inputs: Tensor) -> Tensor:
    """As convolved, of vectors, filters and bias if any: of whole sequences, each a document."""
    return _InKernels.apply(*inputs, *([] if len(inputs) > 4 else [None]))  # type: ignore[no-any-return, no-untyped-call]


class _InKernels(Function):
    """Saves its tensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        from bigplan.kernels.handwritten import gated_filters as kernels

        ctx.save_for_backward(*inputs)
        return kernels.convolved(kernels.Vectors(*inputs[:3]), *inputs[3:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from bigplan.kernels.handwritten import gated_filters as kernels

        *vectors, filters, bias = ctx.saved_tensors
        asked = ctx.needs_input_grad[3]
        found, *others = kernels.convolved_backward(
            kernels.Vectors(*vectors), filters, bias, gradients[0], asked=asked
        )
        return *found, *others


def _convolved(where: Where, with_past: bool, *inputs: Tensor) -> Tensor:
    """As convolved, of vectors, filters, bias if any, and past tokens if any."""
    vectors, filters, others = inputs[:3], inputs[3], list(inputs[4:])
    past = others.pop() if with_past else None
    return convolved(vectors, filters, others[0] if others else None, past, where)


def convolved(
    vectors: tuple[Tensor, ...],
    filters: Tensor,
    bias: Tensor | None = None,
    past: Tensor | None = None,
    where: Where = Where(),  # noqa: B008 (it is frozen)
) -> Tensor:
    """Of b, c and v [b, s, h], filters [h, taps] and a bias [h]: [b, s, h].

    `past`: u of the tokens before, [b, taps - 1, h], of which the rank before gets the gradient;
    None: zeros.
    """
    return _Convolved.apply(*vectors, filters, bias, past, where)  # type: ignore[no-any-return, no-untyped-call]


class _Convolved(Function):
    """Saves its tensors."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        before, after, value, filters, bias, past, ctx.where = arguments
        ctx.save_for_backward(before, after, value, filters, bias, past)
        padded = _padded(before, value, past, filters.shape[1] - 1)
        return _sum(padded, filters, bias, ctx.where).mul_(after)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        before, after, value, filters, bias, past = ctx.saved_tensors  # each may be asked for once
        (gradient,), where, taps = gradients, ctx.where, filters.shape[1]
        length = before.shape[1]
        padded = _padded(before, value, past, taps - 1)
        by_after = _sum(padded, filters, bias, where).mul_(gradient)
        by_sum = gradient * after
        by_bias = by_sum.sum((0, 1)) if bias is not None else None
        by_filters, by_padded = torch.zeros_like(filters), torch.zeros_like(padded)
        for tap in range(taps):
            shifted, there = slice(tap, tap + length), where.reaches(taps - 1 - tap, length)
            part = by_sum if there is None else by_sum * there
            if ctx.needs_input_grad[3]:
                by_filters[:, tap] = (part * padded[:, shifted]).sum((0, 1))
            by_padded[:, shifted].addcmul_(part, filters[:, tap])
        del padded, by_sum, part
        by_gated = by_padded[:, taps - 1 :]
        if past is not None:
            by_past = by_padded[:, : taps - 1]
            by_gated[:, 1 - taps :] += _from_neighbour(by_past, where.context.group, after=True)
        return by_gated * value, by_after, by_gated * before, by_filters, by_bias, None, None


def _past(before: Tensor, value: Tensor, tokens: int, group: RankGroup) -> Tensor | None:
    """The last tokens of u of the rank before, where ranks split sequences."""
    if group.size == 1 or not tokens:
        return None
    with torch.no_grad():
        own = before[:, -tokens:] * value[:, -tokens:]
        return _from_neighbour(own, group, after=False)


def _from_neighbour(x: Tensor, group: RankGroup, *, after: bool) -> Tensor:
    """X of the rank after this one, or before; zeros of none."""
    step = 1 if after else -1
    parts = x.new_zeros(group.size, *x.shape)
    to, source = group.place - step, group.place + step
    if 0 <= to < group.size:
        parts[to] = x
    found = group.exchanged(parts)
    return found[source].clone() if 0 <= source < group.size else torch.zeros_like(x)


def _padded(before: Tensor, value: Tensor, past: Tensor | None, tokens: int) -> Tensor:
    """U [b, s, h] below so many tokens that come before it: [b, tokens + s, h]."""
    batch, length, channels = before.shape
    padded = before.new_empty(batch, tokens + length, channels)
    if past is None:
        padded[:, :tokens].zero_()
    else:
        padded[:, :tokens].copy_(past)
    torch.mul(before, value, out=padded[:, tokens:])
    return padded


def _sum(padded: Tensor, filters: Tensor, bias: Tensor | None, where: Where) -> Tensor:
    """The sum over taps, with the bias: [b, s, h]."""
    past = filters.shape[1] - 1
    length = padded.shape[1] - past
    total = padded[:, past:] * filters[:, past]
    for tap in range(past):
        shifted, there = padded[:, tap : tap + length], where.reaches(past - tap, length)
        total.addcmul_(shifted if there is None else shifted * there, filters[:, tap])
    return total if bias is None else total.add_(bias)
