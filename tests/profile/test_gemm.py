"""Rates of products as figures of a GPU."""

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.cost.compute import Device, gemm_seconds
from bigplan.graph.operators import Gemm, by_input_and_weight
from bigplan.profile.fit import fit_gemm, with_gemm_rate
from bigplan.profile.gemm import GPU_LAYERS, Timed, _timings, _with_rates, by_way, products
from bigplan.spec.detect.cluster import Fallback
from bigplan.spec.files.document import load_document
from bigplan.spec.files.shipped import PACKAGE
from bigplan.spec.gpu import Gpu, find_gpu
from tests.examples import examples
from tests.profile.small import bench


def fallback() -> Fallback:
    return load_document(PACKAGE / "spec" / "detect" / "fallback.yaml", Fallback)


def rates_of(gpu: Gpu, **rates: float) -> Gpu:
    return _with_rates(gpu, "bf16", rates, 187.6, ("12 products", ", hot"))


def test_shares_of_the_datasheets_peaks() -> None:
    before = find_gpu("h200-sxm")
    gpu = rates_of(before, bf16=7.915e14, fp16=7.915e14, fp32=5.02e13)
    assert gpu.peak_flops == before.peak_flops
    assert (gpu.gemm_efficiency, gpu.gemm_half_k) == (0.8, 188)
    assert gpu.gemm_efficiencies == {"fp32": 0.75}
    assert gpu.gemm_share("fp32") == 0.75
    assert gpu.gemm_share("fp16") == gpu.gemm_share("fp8") == 0.8
    assert gpu.sources["peak_flops"] == before.sources["peak_flops"]
    assert gpu.sources["gemm_efficiency"].endswith("by bigplan profile: 12 products, hot")
    assert gpu.sources["gemm_efficiencies"].endswith("in each of these precisions, hot")


def test_a_rate_above_the_stated_peak_stands_for_it() -> None:
    gpu = rates_of(find_gpu("h200-sxm"), bf16=1.2e15, fp16=9e14)
    assert gpu.peak("bf16") == 1.2e15
    assert gpu.gemm_efficiency == 1.0
    assert gpu.gemm_efficiencies == {"fp16": 0.91}
    assert "for want of a datasheet: bf16 1.2 PFLOP/s" in gpu.sources["peak_flops"]


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_where_no_peak_is_known_rates_stand_for_them(kind: str) -> None:
    gpu = rates_of(getattr(fallback(), kind), bf16=1e13, fp32=2e12)
    assert (gpu.peak("bf16"), gpu.peak("fp32")) == (1e13, 2e12)
    assert gpu.gemm_efficiency == 1.0
    assert gpu.gemm_efficiencies is None


def test_a_layers_products_are_those_that_autograd_makes_and_plans_price() -> None:
    x, w = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    y, g = torch.nn.functional.linear(x, w), torch.randn(6, 5)
    expected = (y, *torch.autograd.grad(y, (x, w), g))
    made = list(products(x.detach(), w.detach(), g))
    for (_, _, work), tensor in zip(made, expected, strict=True):
        torch.testing.assert_close(work(), tensor)
    linear = Gemm("product", 6, 5, 4)
    priced = (linear, *by_input_and_weight((linear,)))
    assert [(p.m, p.n, p.k) for _, p, _ in made] == [(p.m, p.n, p.k) for p in priced]


@settings(max_examples=examples(50))
@given(st.floats(0.85, 1.1), st.floats(0.85, 1.1), st.floats(0, 400))
def test_ways_of_other_rates_count_once_each(by_input: float, by_weight: float, k0: float) -> None:
    """So that the layers' forward and backward together take what they were measured to take."""
    gpu = find_gpu("h200-sxm")
    device = Device(with_gemm_rate(gpu, "bf16", 7e14, k0), "bf16")
    factors = {"forward": 1.0, "by input": by_input, "by weight": by_weight}
    gemms, times = [], []
    for m, n, k in GPU_LAYERS:
        shapes = ((m, n, k), (m, k, n), (n, k, m))
        for factor, shape in zip(factors.values(), shapes, strict=True):
            gemms.append(Gemm("product", *shape))
            times.append(gemm_seconds(gemms[-1], device) / factor)
    fit = fit_gemm(gemms, times, gpu, "bf16")
    fitted = Device(with_gemm_rate(gpu, "bf16", fit.rate, fit.half_k), "bf16")
    whole = sum(gemm_seconds(gemm, fitted) for gemm in gemms)
    assert whole == pytest.approx(sum(times), rel=0.02)


def test_rates_by_way() -> None:
    gemm = Gemm("product", 1000, 1000, 500)  # 1 GFLOP
    timed = [
        Timed("forward", gemm, 1e-3),
        Timed("forward", gemm, 3e-3),
        Timed("by weight", gemm, 1),
    ]
    assert by_way(timed) == "forward 500 GFLOP/s, by weight 1 GFLOP/s"


def test_on_a_cpu_only_the_forwards_products_are_timed() -> None:
    timed = _timings([(64, 32, 16), (32, 16, 8)], "fp32", bench(), 0.01)
    assert [(p.way, p.gemm.m) for p in timed] == [("forward", 32), ("forward", 64)]
    assert all(product.seconds > 0 for product in timed)
