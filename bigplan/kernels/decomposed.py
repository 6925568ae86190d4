"""Batch norm taken apart into steps that each are one kernel, forward and backward.

Its statistics are of channels, over images and their positions. In the memory order [n, c, h, w] a
row is one channel of one image. A first kernel reduces rows, and a second one, of few bytes, adds
up the images of a channel. The rest is arithmetic on each position; the activation or sum that
follows joins that arithmetic. In channels-last memory a row is a position, and sums are of columns.

The variance of all images follows from that of each image (Chan et al. 1979). The variance of a
column is of differences from its first row. So no digits are lost in a difference of large squares.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

ATEN = torch.ops.aten
Statistics = tuple[Tensor, Tensor]


def _expanded(vector: Tensor, x: Tensor) -> Tensor:
    """A value a channel as a tensor like x, without memory of its own."""
    return vector.view(1, -1, *[1] * (x.dim() - 2)).expand(x.shape)


def _by_position(x: Tensor) -> bool:
    """Whether channels of a position lie side by side."""
    return prod(x.shape[2:]) == 1 or (x.dim() == 4 and x.stride(1) == 1 and x.shape[1] > 1)


def _positions(x: Tensor) -> Tensor:
    """[n, c, ...] in channels-last memory as [positions, c]."""
    moved = x.permute(0, 2, 3, 1) if x.dim() == 4 else x.flatten(1)
    return moved.reshape(-1, x.shape[1])


def _images(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], -1)


def _of_channels(sums: Tensor) -> Tensor:
    """Sums [n, c, 1] over images, [c, 1]."""
    return sums.squeeze(-1).t().sum(-1, keepdim=True)


def _statistics(x: Tensor) -> Statistics:
    """Mean and variance (of all positions) of every channel, fp32 [c, 1]."""
    count = x.numel() // x.shape[1]
    if _by_position(x):
        rows = _positions(x)
        shift = rows[:1]
        centred = rows.float() - shift  # the cast is inside the kernel; of the row it would be one
        first = centred.sum(0).view(-1, 1) / count
        square = (centred * centred).sum(0).view(-1, 1) / count
        return shift.view(-1, 1) + first, square - first * first
    rows, each = _images(x), prod(x.shape[2:])
    mean = rows.mean(-1, keepdim=True, dtype=torch.float32)
    centred = rows - mean
    square = (centred * centred).sum(-1, keepdim=True)
    means = mean.squeeze(-1).t()
    whole = means.mean(-1, keepdim=True)
    apart = means - whole
    return whole, (square.squeeze(-1).t() + apart * apart * each).sum(-1, keepdim=True) / count


def _moved(running: Tensor, new: Tensor, momentum: float) -> Tensor:
    """The running statistic [c] after a batch's [c, 1]."""
    mixed = running.view(-1, 1) * (1 - momentum) + new * momentum
    return mixed.to(running.dtype).view(-1)


def _normed(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    out = (x - mean) * rstd
    if weight is not None:
        out = out * _expanded(weight, x)
    if bias is not None:
        out = out + _expanded(bias, x)
    return out.to(x.dtype)


def _known(x: Tensor, weight: Any, bias: Any, running: Statistics, epsilon: float) -> Tensor:
    """By running statistics: arithmetic on each position alone."""
    mean, variance = (_expanded(one, x).float() for one in running)
    return _normed(x, mean, torch.rsqrt(variance + epsilon), weight, bias)


def _functional(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, training: bool,
    momentum: float, epsilon: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As aten._native_batch_norm_legit_functional: result, statistics, running statistics."""
    if not training:
        empty = x.new_empty(0, dtype=torch.float32)
        out = _known(x, weight, bias, (mean, variance), epsilon)
        return out, empty, empty, mean.clone(), variance.clone()
    count = x.numel() // x.shape[1]
    own, spread = _statistics(x)
    rstd = torch.rsqrt(spread + epsilon)
    unbiased = spread * (count / max(1, count - 1))
    moved = _moved(mean, own, momentum), _moved(variance, unbiased, momentum)
    out = _normed(x, _expanded(own, x), _expanded(rstd, x), weight, bias)
    return out, own.view(-1), rstd.view(-1), *moved


def _without_running(
    x: Tensor, weight: Any, bias: Any, training: bool, momentum: float, epsilon: float
) -> tuple[Tensor, ...]:
    """As aten._native_batch_norm_legit.no_stats."""
    own, spread = _statistics(x)
    rstd = torch.rsqrt(spread + epsilon)
    out = _normed(x, _expanded(own, x), _expanded(rstd, x), weight, bias)
    return out, own.view(-1), rstd.view(-1)


def _no_training(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, momentum: float,
    epsilon: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _functional(x, weight, bias, mean, variance, False, momentum, epsilon)[:3]


def _backward(
    gradient: Tensor, x: Tensor, weight: Any, mean: Any, variance: Any, saved_mean: Any,
    saved_rstd: Any, training: bool, epsilon: float, wanted: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As aten.native_batch_norm_backward: gradients by x, weight and bias."""
    count = x.numel() // x.shape[1]
    if training:
        centre, rstd = saved_mean.view(-1, 1), saved_rstd.view(-1, 1)
    else:
        centre, rstd = mean.view(-1, 1).float(), torch.rsqrt(variance.view(-1, 1).float() + epsilon)
    if _by_position(x):
        rows, given = _positions(x), _positions(gradient)
        total = given.sum(0, dtype=torch.float32).view(-1, 1)
        along = (given * (rows - centre.view(1, -1))).sum(0).view(-1, 1) * rstd
    else:
        images, given = _images(x), _images(gradient)
        total = _of_channels(given.sum(-1, keepdim=True, dtype=torch.float32))
        apart = images - centre.view(1, -1, 1).expand(images.shape)
        along = _of_channels((given * apart).sum(-1, keepdim=True)) * rstd
    scale = _expanded(rstd, x)
    by_x = gradient
    if training:
        by_x = gradient - _expanded(total, x) * (1 / count)
        by_x = by_x - (x - _expanded(centre, x)) * scale * (_expanded(along, x) * (1 / count))
    by_x = by_x * scale
    if weight is not None:
        by_x = by_x * _expanded(weight, x)
    kind = x.dtype if weight is None else weight.dtype
    found = by_x.to(x.dtype), along.view(-1).to(kind), total.view(-1).to(kind)
    return tuple(one if want else None for one, want in zip(found, wanted, strict=True))


DECOMPOSED: dict[Any, Callable[..., Any]] = {
    ATEN._native_batch_norm_legit_functional.default: _functional,
    ATEN._native_batch_norm_legit.no_stats: _without_running,
    ATEN._native_batch_norm_legit_no_training.default: _no_training,
    ATEN.native_batch_norm_backward.default: _backward,
}
