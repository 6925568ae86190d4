from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.graph.operators import Attention, Collective, Gemm, Stream, doubled_reach

SIZE = st.integers(1, 500)


def test_a_product_by_hand() -> None:
    gemm = Gemm("w", 2, 3, 4)
    assert gemm.flops == 2 * (2 * 3 * 4)  # a multiplication and an addition
    assert gemm.elements == 2 * 4 + 4 * 3 + 2 * 3


@given(SIZE, SIZE, SIZE, st.integers(1, 9), st.integers(1, 9))
def test_batches_and_launches_multiply_alike(
    m: int, n: int, k: int, batch: int, count: int
) -> None:
    once, many = Gemm("w", m, n, k), Gemm("w", m, n, k, batch, count)
    assert many.flops == once.flops * batch * count
    assert many.elements == once.elements * batch * count


def test_plain_operators_are_alone_fused_and_exposed() -> None:
    assert (Stream("norm", 8).launches, Stream("norm", 8).eager) == (1, 1.0)
    assert (
        Collective("sum", "all_reduce", 8).count,
        Collective("sum", "all_reduce", 8).hidden,
    ) == (
        1,
        False,
    )
    assert not Gemm("w", 1, 1, 1).fp8
    assert not Attention("attention", 1.0).backward


@given(st.integers(1, 500), st.integers(1, 600))
def test_a_token_attends_to_its_window_or_to_all_before_it(length: int, window: int) -> None:
    seen = sum(min(position, window) for position in range(1, length + 1))
    diagonal = min(window, length) / 2  # counts as half
    assert doubled_reach(length, window) == pytest.approx(2 * (seen - diagonal) / length)
    assert doubled_reach(length, None) == doubled_reach(length, length) == length
