"""Products of experts in 8 bits: of what their casts keep, whatever numbers of rows they have."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts.grouped import EXPERTS_AS_STORED, Grouped
from bigplan.runtime.experts.grouped_eight_bits import EightBitExperts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = torch.bfloat16
COUNTS = [(5, 0, 130, 1, 0, 64), (200, 0, 0), (0, 0, 7), (1,) * 40, (0, 300)]
# E4M3 rounds to 2^-4 of a value at most, 0.026 of it in the mean square, both factors apart. Of
# products of independent terms as much is lost of the result.
LOST = 0.045


def _make(device: str, seed: int, *shape: int) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    return made.to(device, BF16)


def _apart(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def _all(by: Grouped, counts: tuple[int, ...], widths: tuple[int, int], device: str) -> Any:
    """Forward, backward, and weights' gradients: fresh, and added to these."""
    (hidden, ffn), number = widths, len(counts)
    ends = torch.tensor(counts, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    rows = _make(device, 1, sum(counts), hidden)
    gradient = _make(device, 2, sum(counts), ffn)
    weight = _make(device, 3, ffn * number, hidden)
    total = torch.full(weight.shape, torch.nan, device=device)
    pair: Any = {"factors": (gradient, by.read_again(rows, ends)), "ends": ends}
    by.add(total, fresh=True, by=experts.put, **pair)
    once = total.clone()
    by.add(total, fresh=False, by=experts.put, **pair)
    return [
        by.entering(by.read(rows), weight, ends),
        by.leaving(by.read(gradient), weight, ends),
        once,
        total,
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("widths", [(64, 32), (256, 512), (16, 144)])
def test_products_lose_what_8_bits_do(
    device: str, counts: tuple[int, ...], widths: tuple[int, int]
) -> None:
    """Experts without rows get gradients of zeros, and scales are those of each row."""
    found = _all(EightBitExperts(), counts, widths, device)
    exact = _all(EXPERTS_AS_STORED, counts, widths, device)
    for ours, plain in zip(found, exact, strict=True):
        assert ours.dtype is plain.dtype
        assert _apart(ours, plain) < LOST
    assert all(_apart(found[i], exact[i]) > 0.01 for i in range(2))
    by_expert = found[2].view(widths[1], len(counts), -1).abs().sum((0, 2)) > 0
    assert by_expert.tolist() == [count > 0 for count in counts]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_any_size_lose_as_little(device: str) -> None:
    """One scale for all of them would leave nothing of the smallest."""
    ends = torch.tensor([40, 90], dtype=torch.int32, device=device)
    sizes = 10.0 ** torch.linspace(-12, 6, 90, device=device)[:, None]
    rows, weight = _make(device, 4, 90, 64) * sizes, _make(device, 5, 64, 64)
    rows = rows.to(BF16)
    ours, exact = (
        by.entering(by.read(rows), weight, ends) for by in (EightBitExperts(), EXPERTS_AS_STORED)
    )
    assert all(_apart(one, other) < 2 * LOST for one, other in zip(ours, exact, strict=True))


def test_without_a_row_there_is_nothing_to_multiply() -> None:
    """As on a rank whose experts no token chooses."""
    by, ends = EightBitExperts(), torch.zeros(3, dtype=torch.int32)
    rows, weight = _make("cpu", 0, 0, 32), _make("cpu", 1, 48, 32)
    assert by.entering(by.read(rows), weight, ends).shape == (0, 16)
    total = torch.full(weight.shape, torch.nan)
    gradient, read = _make("cpu", 0, 0, 16), by.read_again(rows, ends)
    by.add(total, fresh=True, factors=(gradient, read), ends=ends, by=experts.put)
    assert not total.any()
