"""The gated short convolution is torch's, of each document by itself."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.runtime.mixers.convolution import Where, convolved

BATCH, LENGTH, CHANNELS = 2, 9, 4
BEGINS = [[0, 0, 0, 0, 4, 4, 6, 6, 6], [0, 1, 1, 1, 1, 1, 1, 1, 8]]


def _inputs(taps: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    torch.manual_seed(0)
    size = BATCH, LENGTH, CHANNELS
    vectors = tuple(torch.randn(size, dtype=torch.float64, requires_grad=True) for _ in range(3))
    filters = torch.randn(CHANNELS, taps, dtype=torch.float64, requires_grad=True)
    return vectors, filters, torch.randn(CHANNELS, dtype=torch.float64, requires_grad=True)


def _plain(vectors: tuple[Tensor, ...], filters: Tensor, bias: Tensor) -> Tensor:
    """By torch's convolution of channels apart, over a sequence below zeros."""
    before, after, value = vectors
    padded = F.pad((before * value).transpose(1, 2), (filters.shape[1] - 1, 0))
    return after * F.conv1d(padded, filters[:, None], bias, groups=CHANNELS).transpose(1, 2)


@pytest.mark.parametrize("taps", [1, 3, 12])
def test_it_is_torchs_with_its_gradients(taps: int) -> None:
    vectors, filters, bias = inputs = _inputs(taps)
    ours, plain = convolved(*inputs), _plain(*inputs)
    torch.testing.assert_close(ours, plain)
    leaves, gradient = (*vectors, filters, bias), torch.randn_like(plain)
    by_ours, by_plain = (torch.autograd.grad(y, leaves, gradient) for y in (ours, plain))
    torch.testing.assert_close(by_ours, by_plain)


@pytest.mark.parametrize("taps", [3, 5])
def test_it_keeps_documents_apart(taps: int) -> None:
    vectors, filters, bias = _inputs(taps)
    begins = torch.tensor(BEGINS, dtype=torch.int32)
    ours = convolved(vectors, filters, bias, where=Where(begins=begins))
    alone = torch.empty_like(ours)
    for sequence, starts in enumerate(BEGINS):
        edges = [*sorted({*starts}), LENGTH]
        for first, last in itertools.pairwise(edges):
            part = tuple(x[sequence : sequence + 1, first:last] for x in vectors)
            alone[sequence, first:last] = _plain(part, filters, bias)[0]
    torch.testing.assert_close(ours, alone)
    leaves, gradient = (*vectors, filters, bias), torch.randn_like(ours)
    by_ours, by_alone = (torch.autograd.grad(y, leaves, gradient) for y in (ours, alone))
    torch.testing.assert_close(by_ours, by_alone)
