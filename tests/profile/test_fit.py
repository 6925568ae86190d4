"""Fits give back the constants that synthetic timings were made with."""

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.cost.compute import Device, attention_seconds, gemm_seconds
from bigplan.graph.operators import Attention, Gemm
from bigplan.profile.fit import (
    Exchange,
    exchange_seconds,
    fit_attention,
    fit_gemm,
    fit_link,
    fit_transfer,
    gemm_rate,
    with_attention,
    with_gemm_rate,
)
from bigplan.spec.gpu import find_gpu, list_gpus
from bigplan.spec.link import Traffic, find_link

MiB = 2**20
SHAPES = [
    Gemm("product", m, n, k)
    for m in (2048, 8192)
    for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 512), (8192, 1024))
]
GPUS = st.sampled_from([name for name in list_gpus() if "bf16" in find_gpu(name).peak_flops])
RATES = st.floats(1e13, 2e15)


@given(GPUS, RATES, st.floats(20, 1000))
def test_rate_and_half_k_come_back(name: str, rate: float, half_k: float) -> None:
    gpu = find_gpu(name)
    device = Device(with_gemm_rate(gpu, "bf16", rate, half_k), "bf16")
    fit = fit_gemm(SHAPES, [gemm_seconds(gemm, device) for gemm in SHAPES], gpu, "bf16")
    # Where traffic takes most of the time, the rate hides behind it.
    assert fit.rate == pytest.approx(rate, rel=1e-3)
    assert fit.half_k == pytest.approx(half_k, rel=1e-2, abs=1)
    assert fit.error < 1e-4


@given(st.lists(st.floats(0.95, 1.05), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_noise_of_a_few_percent_moves_the_rate_by_a_few_percent(noise: list[float]) -> None:
    gpu = find_gpu("h200-sxm")
    device = Device(with_gemm_rate(gpu, "bf16", 7.8e14, 200.0), "bf16")
    times = [f * gemm_seconds(gemm, device) for f, gemm in zip(noise, SHAPES, strict=True)]
    fit = fit_gemm(SHAPES, times, gpu, "bf16")
    assert fit.rate == pytest.approx(7.8e14, rel=0.12)
    assert fit.error <= 0.06


def test_products_that_no_k_slows_down_have_no_half_k() -> None:
    gpu = find_gpu("h200-sxm")
    device = Device(with_gemm_rate(gpu, "bf16", 5e14, 0.0), "bf16")
    fit = fit_gemm(SHAPES, [gemm_seconds(gemm, device) for gemm in SHAPES], gpu, "bf16")
    assert fit.half_k < 1
    assert fit.rate == pytest.approx(5e14, rel=1e-3)


def test_half_k_never_passes_the_largest_k_measured() -> None:
    """Timings that grow with 1/k^2 ask for K0 without end."""
    gemms = [Gemm("product", 4096, 4096, k) for k in (512, 1024, 2048)]
    times = [1e-3 * 2048 / gemm.k for gemm in gemms]
    assert fit_gemm(gemms, times, find_gpu("h200-sxm"), "bf16").half_k <= 2048


@given(RATES)
def test_the_rate_of_another_precision(rate: float) -> None:
    gpu = find_gpu("h200-sxm")
    device = Device(with_gemm_rate(gpu, "fp16", rate, 150.0), "fp16")
    times = [gemm_seconds(gemm, device) for gemm in SHAPES[:2]]
    assert gemm_rate(SHAPES[:2], times, gpu, "fp16", 150.0) == pytest.approx(rate, rel=1e-3)


LENGTHS = (4096, 8192, 16384, 32768)
SHARES = st.floats(0.05, 0.95)


def _kernels(backward: bool) -> list[Attention]:
    return [Attention("attention", 1e9 * s, 0.0, backward, 128, s) for s in LENGTHS]


def _seconds(name: str, efficiency: float, half_length: float, backward: bool) -> list[float]:
    gpu = with_attention(find_gpu(name), efficiency, half_length)
    return [attention_seconds(k, Device(gpu, "bf16", ("sdpa",))) for k in _kernels(backward)]


@given(GPUS, SHARES, st.floats(10, 4000), st.booleans())
def test_efficiency_and_half_length_come_back(
    name: str, efficiency: float, half_length: float, backward: bool
) -> None:
    times = _seconds(name, efficiency, half_length, backward)
    fit = fit_attention(_kernels(backward), times, find_gpu(name), "bf16")
    assert fit.efficiency == pytest.approx(efficiency, rel=1e-4)
    assert fit.half_length == pytest.approx(half_length, rel=1e-2)
    assert fit.worst < 1e-4


@given(GPUS, SHARES, st.booleans())
def test_attention_as_efficient_at_any_length_has_no_half_length(
    name: str, efficiency: float, backward: bool
) -> None:
    times = _seconds(name, efficiency, 0.0, backward)
    fit = fit_attention(_kernels(backward), times, find_gpu(name), "bf16")
    assert fit.half_length == 0
    assert fit.efficiency == pytest.approx(efficiency, rel=1e-3)


def test_a_half_length_is_never_negative_nor_beyond_the_longest_sequence() -> None:
    gpu, kernels = find_gpu("h200-sxm"), _kernels(backward=False)
    even = _seconds("h200-sxm", 0.5, 0.0, backward=False)
    falling = [t * (s / 4096) ** 0.1 for t, s in zip(even, LENGTHS, strict=True)]
    fit = fit_attention(kernels, falling, gpu, "bf16")
    assert fit.half_length == 0
    assert 0.5 * 8**-0.1 < fit.efficiency < 0.5
    rising = [t * (32768 / s) ** 2 for t, s in zip(even, LENGTHS, strict=True)]
    assert fit_attention(kernels, rising, gpu, "bf16").half_length <= 32768


BY_HAND = {
    (efficiency, half_length): _seconds("h200-sxm", efficiency, half_length, backward=True)
    for efficiency in (0.53, 0.54, 0.55, 0.56, 0.57)
    for half_length in (400.0, 500.0, 600.0, 662.0, 700.0, 800.0, 1000.0)
}


@given(st.lists(st.floats(-0.02, 0.02), min_size=4, max_size=4))
def test_no_other_attention_fits_better(noise: list[float]) -> None:
    """By brute force over both constants; the worst error is what is left of the noise."""
    gpu, kernels = find_gpu("h200-sxm"), _kernels(backward=True)
    times = [t * (1 + n) for t, n in zip(BY_HAND[0.55, 662.0], noise, strict=True)]
    fit = fit_attention(kernels, times, gpu, "bf16")
    found = _seconds("h200-sxm", fit.efficiency, fit.half_length, backward=True)

    def squares(predicted: list[float]) -> float:
        return sum(log(p / t) ** 2 for p, t in zip(predicted, times, strict=True))

    assert squares(found) <= min(map(squares, BY_HAND.values())) + 1e-12
    left = max(abs(p / t - 1) for p, t in zip(found, times, strict=True))
    assert fit.worst == pytest.approx(left)


@given(st.floats(1e9, 1e11), st.floats(1e-6, 1e-4))
def test_rate_and_latency_of_transfers_come_back(rate: float, latency: float) -> None:
    sizes = (MiB, 16 * MiB, 256 * MiB)
    fit = fit_transfer(sizes, [latency + size / rate for size in sizes])
    assert fit.rate == pytest.approx(rate, rel=1e-3)
    assert fit.latency == pytest.approx(latency, rel=0.02)


def test_transfers_without_latency() -> None:
    sizes = (MiB, 16 * MiB)
    assert fit_transfer(sizes, [size / 5e10 for size in sizes]).latency < 1e-7


KINDS: tuple[Traffic, ...] = ("all_reduce", "reduce_scatter", "all_gather", "send")
BANDWIDTHS = st.floats(1e9, 5e11)


@given(st.tuples(*[BANDWIDTHS] * 4), st.floats(2e-6, 1e-3), st.floats(1e5, 1e7))
def test_a_links_figures_come_back(
    rates: tuple[float, ...], latency: float, half_size: float
) -> None:
    own = {f"{kind}_bandwidth": rate for kind, rate in zip(KINDS, rates, strict=True)}
    own["bandwidth"] = own.pop("all_reduce_bandwidth")
    figures = own | {"latency": latency, "half_size": half_size}
    link = find_link("nvlink3").model_copy(update=figures)
    exchanges = [
        Exchange(kind, ranks, nbytes)
        for nbytes in (2**16, 2**21, 2**25, 2**28)
        for kind in KINDS
        for ranks in ((2,) if kind == "send" else (2, 4, 8))
    ]
    times = [exchange_seconds(exchange, link) for exchange in exchanges]
    fit = fit_link(exchanges, times)
    assert fit.error < 0.01
    for kind, rate in zip(KINDS, rates, strict=True):
        assert fit.bandwidths[kind] == pytest.approx(rate, rel=0.1)


def test_two_ranks_tell_no_half_size() -> None:
    """It adds as much to each message as a latency does."""
    link = find_link("nvlink4-h200")
    exchanges = [Exchange(kind, 2, nbytes) for nbytes in (2**16, 2**25) for kind in KINDS]
    fit = fit_link(exchanges, [exchange_seconds(one, link) for one in exchanges])
    assert fit.half_size == 0
    assert link.latency < fit.latency < 1e-4
    assert fit.error < 0.15  # a send of two ranks has twice as much of a half size as a collective
