"""Fits give back the constants that synthetic timings were made with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.cost.compute import Device, gemm_seconds
from bigplan.graph.operators import Gemm
from bigplan.profile.fit import fit_gemm, fit_transfer, gemm_rate, with_gemm_rate
from bigplan.spec.cluster import find_gpu, list_gpus

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


@given(st.floats(1e9, 1e11), st.floats(1e-6, 1e-4))
def test_rate_and_latency_of_transfers_come_back(rate: float, latency: float) -> None:
    sizes = (MiB, 16 * MiB, 256 * MiB)
    fit = fit_transfer(sizes, [latency + size / rate for size in sizes])
    assert fit.rate == pytest.approx(rate, rel=1e-3)
    assert fit.latency == pytest.approx(latency, rel=0.02)


def test_transfers_without_latency() -> None:
    sizes = (MiB, 16 * MiB)
    assert fit_transfer(sizes, [size / 5e10 for size in sizes]).latency < 1e-7
