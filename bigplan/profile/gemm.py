"""Matrix products: the two constants of the cost model, and the rate of each precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigplan.graph.operators import Gemm
from bigplan.profile.bench import Bench, rounded, source, threads
from bigplan.profile.fit import fit_gemm, gemm_rate
from bigplan.spec.cluster import Gpu, NodeGroup
from bigplan.units import format_flops

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# m, n, k: tokens, outputs, inputs. Squares, and the products of blocks that people train; the inner
# dimension has to vary for K0 to show.
GPU_SHAPES = (
    *((size, size, size) for size in (512, 1024, 2048, 4096, 8192, 16384)),
    (2048, 8192, 512),
    (8192, 8192, 512),
    (8192, 8192, 1024),
    (8192, 2048, 2048),
    (2048, 14336, 4096),
    (2048, 4096, 14336),
    (8192, 1024, 8192),
    (8192, 5120, 5120),
    (8192, 6144, 4096),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (8192, 128256, 4096),
)
CPU_SHAPES = (
    *((size, size, size) for size in (256, 512, 1024, 2048)),
    (256, 704, 256),
    (256, 256, 704),
    (512, 768, 256),
    (1024, 512, 128),
    (1024, 2816, 1024),
    (1024, 1024, 2816),
)
OTHERS = ((2048, 2048, 2048), (8192, 6144, 4096))  # of the other precisions
CPU_OTHERS = ((256, 704, 256), (1024, 1024, 1024))
# A product this many launches long or shorter is not a product's time: left out of the fit.
LAUNCHES = 4


def measure_gemm(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """gemm_efficiency, gemm_half_k, gemm_efficiencies and, where not known, peak_flops."""
    main, *others = bench.precisions(group.gpu)
    shapes = GPU_SHAPES if bench.cuda else CPU_SHAPES
    with threads(bench.threads):
        gemms, times = _timings(shapes, main, bench, 0.8 * seconds)
        least = LAUNCHES * group.gpu.launch_overhead if bench.cuda else 0.0
        kept = [(g, t) for g, t in zip(gemms, times, strict=True) if t > least]
        if len(kept) < 2:  # a machine so fast or so busy that only the longest tell anything
            kept = sorted(zip(gemms, times, strict=True), key=lambda pair: pair[1])[-2:]
        fit = fit_gemm([g for g, _ in kept], [t for _, t in kept], group.gpu, main)
        rates = {main: fit.rate}
        for precision in others:
            few = OTHERS if bench.cuda else CPU_OTHERS
            found = _timings(few, precision, bench, 0.2 * seconds / len(others))
            rates[precision] = gemm_rate(*found, group.gpu, precision, fit.half_k)
    how = f"{len(kept)} products in {main}, met to {fit.error:.0%} in the mean"
    return group.model_copy(update={"gpu": _with_rates(group.gpu, main, rates, fit.half_k, how)})


def _timings(
    shapes: Sequence[tuple[int, int, int]], precision: str, bench: Bench, seconds: float
) -> tuple[list[Gemm], list[float]]:
    """Seconds of products that fit in memory and into their time, small ones first."""
    gemms: list[Gemm] = []
    times: list[float] = []
    rate = 0.0
    each, room = seconds / len(shapes), bench.device_memory()
    for m, n, k in sorted(shapes, key=lambda shape: shape[0] * shape[1] * shape[2]):
        gemm = Gemm("product", m, n, k)
        # Three runs at least; the smallest two are measured in any case.
        too_long = len(times) > 1 and 3 * gemm.flops / rate > 4 * each
        if too_long or gemm.elements * DTYPES[precision].itemsize > room:
            continue
        a = torch.randn(m, k, device=bench.device).to(DTYPES[precision])
        b = torch.randn(n, k, device=bench.device).to(DTYPES[precision])
        times.append(bench.median(lambda a=a, b=b: a @ b.T, each))  # type: ignore[misc]
        gemms.append(gemm)
        rate = max(rate, gemm.flops / times[-1])
    return gemms, times


def _with_rates(gpu: Gpu, main: str, rates: dict[str, float], half_k: float, how: str) -> Gpu:
    """Shares of known peaks; where a peak is unknown or passed, the rate stands for it.

    On a CPU there is no datasheet: peaks are what was reached.
    """
    by_rate = gpu.device == "cpu" or gpu.sources["peak_flops"].startswith("estimate")
    unknown = {
        name: rounded(rate) for name, rate in rates.items() if by_rate or rate > gpu.peak(name)
    }
    peaks: dict[str, float] = {str(name): peak for name, peak in gpu.peak_flops.items()} | unknown
    shares = {
        name: 1.0 if name in unknown else rounded(rate / peaks[name])
        for name, rate in rates.items()
    }
    values: dict[str, object] = {
        "gemm_efficiency": shares[main],
        "gemm_half_k": rounded(half_k),
    }
    told = {name: source(how) for name in values}
    if unknown:
        values["peak_flops"] = peaks
        named = ", ".join(f"{name} {format_flops(rate)}" for name, rate in unknown.items())
        told["peak_flops"] = source(f"rates of products, for want of a datasheet: {named}")
    if others := {name: share for name, share in shares.items() if share != shares[main]}:
        values["gemm_efficiencies"] = others
        told["gemm_efficiencies"] = source("two products in each of these precisions")
    return gpu.replaced(values, told)
