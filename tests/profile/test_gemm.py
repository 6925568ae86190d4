"""Rates of products as figures of a GPU."""

import pytest

pytest.importorskip("torch")

from bigplan.profile.gemm import _with_rates
from bigplan.spec.cluster import Gpu, find_gpu
from bigplan.spec.detect import Fallback
from bigplan.spec.document import load_document
from bigplan.spec.shipped import PACKAGE


def fallback() -> Fallback:
    return load_document(PACKAGE / "spec" / "fallback.yaml", Fallback)


def rates_of(gpu: Gpu, **rates: float) -> Gpu:
    return _with_rates(gpu, "bf16", rates, 187.6, "12 products")


def test_shares_of_the_datasheets_peaks() -> None:
    before = find_gpu("h200-sxm")
    gpu = rates_of(before, bf16=7.915e14, fp16=7.915e14, fp32=5.02e13)
    assert gpu.peak_flops == before.peak_flops
    assert (gpu.gemm_efficiency, gpu.gemm_half_k) == (0.8, 188)
    assert gpu.gemm_efficiencies == {"fp32": 0.75}
    assert gpu.gemm_share("fp32") == 0.75
    assert gpu.gemm_share("fp16") == gpu.gemm_share("fp8") == 0.8
    assert gpu.sources["peak_flops"] == before.sources["peak_flops"]
    assert "by bigplan profile: 12 products" in gpu.sources["gemm_efficiency"]


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
