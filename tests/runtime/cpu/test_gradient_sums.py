"""Sums over gradients with the compiled kernels and without: the same up to rounding of squares."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest

pytest.importorskip("torch")

import torch

from bigplan.runtime.cpu import gradient_sums
from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.cpu.native import native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def cores() -> Iterator[Cores]:
    with Cores(Fraction(1)) as made:
        yield made


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(gradient_sums, "native", lambda: None)
        monkeypatch.setattr(gradient_sums, "SUMMED_ELEMENTS", 1000)  # several parts and a rest
    elif native() is None:
        pytest.skip("needs a C++ compiler")
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_is_added(cores: Cores, dtype: torch.dtype) -> None:
    total, part = torch.randn(2, 3456).to(dtype).unbind()
    expected = total + part
    gradient_sums.add(total, part, cores)
    assert torch.equal(total, expected)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_are_added(cores: Cores, dtype: torch.dtype) -> None:
    values = torch.randn(3456).to(dtype)
    expected = float(values.double().square().sum())
    assert gradient_sums.square_sum(values, cores) == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("way")
def test_squares_that_pass_fp32_are_infinite(cores: Cores) -> None:
    values = torch.tensor([1.0, 3e38])
    assert gradient_sums.square_sum(values, cores) == float("inf")


def test_other_dtypes_are_left_to_torch(cores: Cores) -> None:
    total = torch.ones(10, dtype=torch.float64)
    gradient_sums.add(total, total.clone(), cores)
    assert torch.equal(total, torch.full((10,), 2.0, dtype=torch.float64))
