"""Casts of experts' rows and matrices: the kernels against plain torch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bigplan.kernels.handwritten import expert_casts as kernel
from bigplan.runtime.experts import grouped_eight_bits as plain
from bigplan.runtime.experts.grouped_eight_bits import HIGHEST, VALUES, Ends
from tests.examples import examples
from tests.kernels.generated import DEVICE, random

runs = settings(max_examples=examples(12), derandomize=True, deadline=None)
counts = st.lists(st.sampled_from((0, 1, 7, 16, 40, 150)), min_size=1, max_size=5)
widths = st.sampled_from((16, 48, 144))


def _exact(seed: int, rows: int, columns: int) -> Tensor:
    """What 8 bits hold whatever other values a scale is of: powers of two.

    Triton's interpreter does not round as a GPU does; these need no rounding.
    """
    exponents = (random(seed, rows, columns) * 2).round().clamp(-6, 6)
    return (random(seed + 1, rows, columns).sign() * 2.0**exponents).bfloat16()


def _rows(x: Tensor, experts: int, by_row: plain.CastsRows) -> tuple[Tensor, Tensor]:
    values = torch.empty_like(x, dtype=VALUES)
    scales = torch.full((experts, len(x) // experts), torch.nan, device=x.device)
    by_row(x, values, scales)
    return values, scales


def _same(
    ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], *, ties: float = 0.0
) -> None:
    """A GPU divides to 2 units in the last place, so of a million values a few round otherwise."""
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-6, atol=0.0)
    unlike = ours[0].float() != expected[0].float()
    assert float(unlike.double().mean()) <= ties


def _ends(counts: list[int]) -> Ends:
    ends = torch.tensor(counts, dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    return Ends.of(ends, sum(counts))


@given(st.integers(1, 9), st.integers(1, 5), widths)
@runs
def test_rows_and_columns_of_matrices(each: int, experts: int, width: int) -> None:
    x = _exact(each, each * experts, width)
    found = _rows(x, experts, kernel.by_row)
    _same(found, _rows(x, experts, plain.by_row))
    by = found[1].T.reshape(-1, 1)  # row j E + e is row j of expert e
    assert torch.equal(found[0].float() * by, x.float())
    turned = kernel.by_column(x, experts)
    _same(turned, plain.by_column(x, experts))
    whole = (turned[0].float() * turned[1][:, :, None]).permute(2, 0, 1)
    assert torch.equal(whole.reshape(x.shape), x.float())


@given(counts, widths)
@runs
def test_columns_of_rows_begin_at_multiples_and_are_filled_up(
    counts: list[int], width: int
) -> None:
    ends, x = _ends(counts), _exact(3, sum(counts), width)
    both = ends.rows, ends.turned
    values, scales = kernel.by_column(x, len(counts), both, ends.long)
    expected, by = plain.by_column(x, len(counts), both, ends.long)
    last = int(ends.turned[-1])
    assert last <= ends.long  # behind it nobody reads
    _same((values[:, :last], scales), (expected[:, :last], by))
    begin = first = 0
    for expert, (count, end) in enumerate(zip(counts, ends.turned.tolist(), strict=True)):
        assert end > begin
        assert end % plain.PART == 0
        part = values[:, begin:end].float() * scales[expert][:, None]
        assert torch.equal(part[:, :count].T, x[first : first + count].float())
        assert not part[:, count:].any()
        begin, first = end, first + count


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_a_gpu_rounds_as_torch_does(scale: float) -> None:
    counts = [300, 0, 5, 700]
    ends, x = _ends(counts), (random(0, 1005, 336) * scale).bfloat16()
    _same(_rows(x, 5, kernel.by_row), _rows(x, 5, plain.by_row), ties=1e-4)
    _same(kernel.by_column(x, 5), plain.by_column(x, 5), ties=1e-4)
    both, last = (ends.rows, ends.turned), int(ends.turned[-1])
    found, expected = (
        one(x, len(counts), both, ends.long) for one in (kernel.by_column, plain.by_column)
    )
    _same((found[0][:, :last], found[1]), (expected[0][:, :last], expected[1]), ties=1e-4)


def test_zeros_have_finite_factors() -> None:
    x = torch.zeros(4, 16, device=DEVICE, dtype=torch.bfloat16)
    values, scales = _rows(x, 2, kernel.by_row)
    assert not values.float().any()
    assert float(scales.max()) == pytest.approx(1e-30 / HIGHEST)
