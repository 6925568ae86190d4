"""The gated short convolution of bigplan/spec/mixers.py, as a sum of shifted products.

With u = b v and a channel's n weights w, token t of the result is c_t (bias + sum over i of
w_{n-1-i} u_{t-i}). A token before the sequence, or before the token's document where documents are
kept apart, counts as zero. The three vectors alone are saved; the backward makes u and the sum
again.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.positions import Positions
from bigplan.runtime.ways import Parameters, Ways
from bigplan.spec.convolution_steps import AFTER, BEFORE, FILTERS, FILTERS_BIAS, VALUE
from bigplan.spec.model import ModelSpec


def mixed(p: Parameters, x: Tensor, model: ModelSpec, positions: Positions, ways: Ways) -> Tensor:
    """What the convolution makes of x, the normed residual stream, before its last product.

    `positions` tell how many tokens of a sequence this rank has, and where documents begin.
    """
    length = len(positions.tables[0])
    products = ways.linears(p, (BEFORE, AFTER, VALUE), x)
    vectors = [y.view(-1, length, y.shape[-1]) for y in products]
    conv = model.convolution
    assert conv is not None, model.name
    filters = [p[FILTERS], *([p[FILTERS_BIAS]] if conv.bias else ())]
    within = None if positions.bounds is None else Documents(positions.bounds[:, 0])
    convolve = partial(convolved, documents=within)
    output = convolve(*vectors, *filters)
    ways.forget(output, convolve, *vectors, *filters)
    return output


class Documents(NamedTuple):
    """Where documents begin that are kept apart."""

    begins: Tensor  # the first token of each token's document, int32 [b, s]

    def reaches(self, back: int) -> Tensor:
        """1 where the token so many places before belongs to the same document, else 0: [b, s, 1]."""
        places = torch.arange(self.begins.shape[1], device=self.begins.device)
        return (places - back >= self.begins)[..., None]


def convolved(
    before: Tensor,
    after: Tensor,
    value: Tensor,
    filters: Tensor,
    bias: Tensor | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """Of three vectors [b, s, h], filters [h, taps] and a bias [h]: [b, s, h]."""
    return _Convolved.apply(before, after, value, filters, bias, documents)  # type: ignore[no-any-return, no-untyped-call]


class _Convolved(Function):
    """Saves the vectors, filters and bias."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        before, after, value, filters, bias, documents = arguments
        ctx.documents = documents
        ctx.save_for_backward(before, after, value, filters, bias)
        padded = _padded(before, value, filters.shape[1] - 1)
        return _sum(padded, filters, bias, documents).mul_(after)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        before, after, value, filters, bias = ctx.saved_tensors  # each may be asked for once
        (gradient,), documents, taps = gradients, ctx.documents, filters.shape[1]
        length, past = before.shape[1], taps - 1
        padded = _padded(before, value, past)
        by_after = _sum(padded, filters, bias, documents).mul_(gradient)
        by_sum = gradient * after
        by_bias = by_sum.sum((0, 1)) if bias is not None else None
        by_filters, by_padded = torch.zeros_like(filters), torch.zeros_like(padded)
        for tap in range(taps):
            shifted = slice(tap, tap + length)
            part = by_sum
            if documents is not None and tap < past:
                part = by_sum * documents.reaches(past - tap)
            if ctx.needs_input_grad[3]:
                by_filters[:, tap] = (part * padded[:, shifted]).sum((0, 1))
            by_padded[:, shifted].addcmul_(part, filters[:, tap])
        del padded, by_sum, part
        by_gated = by_padded[:, past:]
        return by_gated * value, by_after, by_gated * before, by_filters, by_bias, None


def _padded(before: Tensor, value: Tensor, past: int) -> Tensor:
    """u [b, s, h] below `past` tokens of zeros: [b, past + s, h]."""
    batch, length, channels = before.shape
    padded = before.new_empty(batch, past + length, channels)
    padded[:, :past].zero_()
    torch.mul(before, value, out=padded[:, past:])
    return padded


def _sum(
    padded: Tensor, filters: Tensor, bias: Tensor | None, documents: Documents | None
) -> Tensor:
    """The sum over taps, with the bias: [b, s, h]."""
    past = filters.shape[1] - 1
    length = padded.shape[1] - past
    total = padded[:, past:] * filters[:, past]
    for tap in range(past):
        shifted = padded[:, tap : tap + length]
        if documents is not None:
            shifted = shifted * documents.reaches(past - tap)
        total.addcmul_(shifted, filters[:, tap])
    return total if bias is None else total.add_(bias)
