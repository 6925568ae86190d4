"""Matrix products: the two constants of the cost model, and the rate of each precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bigplan.graph.operators import Gemm
from bigplan.profile.bench import DTYPES, READ_EVERY, Bench, Conditions, source, threads
from bigplan.profile.fit import fit_gemm, gemm_rate
from bigplan.profile.sensors import watching
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.gpu import Gpu
from bigplan.units import format_flops, rounded

# Linear layers as tokens, outputs, inputs: those of 8B and 13B models at a micro-batch's tokens, a
# vocabulary, and a few narrow ones. K0 shows only where the inner dimension varies.
GPU_LAYERS = (
    (2048, 2048, 2048),
    (2048, 14336, 4096),
    (8192, 1024, 4096),
    (8192, 8192, 1024),
    (8192, 4096, 4096),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (16384, 5120, 5120),
    (16384, 13824, 5120),
    (16384, 5120, 13824),
    (32768, 4096, 4096),
    (32768, 14336, 4096),
    (32768, 4096, 14336),
    (8192, 128256, 4096),
)
CPU_LAYERS = (
    *((size, size, size) for size in (256, 512, 1024, 2048)),
    (256, 704, 256),
    (256, 256, 704),
    (512, 768, 256),
    (1024, 512, 128),
    (1024, 2816, 1024),
    (1024, 1024, 2816),
)
# Rows and columns of both matrices of a product that keeps the whole GPU at work, and so takes the
# most power: by itself 684 TFLOP/s on an H200, where 8B's products of 4,096 tokens run at 700
# (benchmarks/results/2026-11-30-h200-checked).
LARGEST = 16384
OTHERS = ((2048, 2048, 2048), (8192, 6144, 4096))  # layers for the other precisions
CPU_OTHERS = ((256, 704, 256), (1024, 1024, 1024))
# A layer's three products read different operands across their rows, so their rates differ: on an
# H200 32768 x 14336 x 4096 ran at 690 TFLOP/s forward, 682 by input and 625 by weight
# (benchmarks/results/2026-11-21-h200-kernels). The fit has each product once, as a step has.
WAYS = ("forward", "by input", "by weight")
# Products of at most so many launch overheads are left out of the fit: launching sways their time.
LAUNCHES = 4


@dataclass(frozen=True, slots=True)
class Timed:
    """A product, which of WAYS it is, and its seconds."""

    way: str
    gemm: Gemm
    seconds: float


def measure_gemm(group: NodeGroup, bench: Bench, seconds: float) -> NodeGroup:
    """The figures of a GPU that begin with gemm_ and, where not known, peak_flops."""
    main, *others = bench.precisions(group.gpu)
    layers = GPU_LAYERS if bench.cuda else CPU_LAYERS
    with threads(bench.threads), bench.conditions() as conditions:
        timed = _timings(layers, main, bench, 0.7 * seconds)
        least = LAUNCHES * group.gpu.launch_overhead if bench.cuda else 0.0
        kept = [product for product in timed if product.seconds > least]
        if len(kept) < 2:  # on so fast or busy a machine only the longest products count
            kept = sorted(timed, key=lambda product: product.seconds)[-2:]
        gemms, times = [p.gemm for p in kept], [p.seconds for p in kept]
        fit = fit_gemm(gemms, times, group.gpu, main)
        rates = {main: fit.rate}
        for precision in others:
            few = OTHERS if bench.cuda else CPU_OTHERS
            found = _timings(few, precision, bench, 0.2 * seconds / len(others))
            gemms, times = [p.gemm for p in found], [p.seconds for p in found]
            rates[precision] = gemm_rate(gemms, times, group.gpu, precision, fit.half_k)
    how = f"{len(kept)} products in {main}, met to {fit.error:.0%} in the mean ({by_way(kept)})"
    gpu = _with_rates(group.gpu, main, rates, fit.half_k, (how, str(conditions)))
    if bench.cuda and bench.device_memory() > 3 * 2 * LARGEST**2:  # both matrices, and the result
        gpu = _with_power_limit(gpu, main, bench, 0.1 * seconds)
    return group.model_copy(update={"gpu": gpu})


def _with_power_limit(gpu: Gpu, precision: str, bench: Bench, seconds: float) -> Gpu:
    """gemm_power_limit, of a product without pause: rounds of the load would raise the clock."""
    alone, dtype = replace(bench, load=None), DTYPES[precision]
    x, w = (torch.randn((LARGEST, LARGEST), device=bench.device).to(dtype) for _ in range(2))
    with watching(bench.device, READ_EVERY / 4) as watch:
        alone.median(lambda: x @ w, seconds / 2)  # until the clock has settled
        reached = 2 * LARGEST**3 / alone.median(lambda: x @ w, seconds / 2)
    rate = format_flops(rounded(reached))
    how = f"a product of {LARGEST} cubed without pause, {rate}{Conditions('', watch)}"
    return gpu.replaced(
        {"gemm_power_limit": rounded(min(1.0, reached / gpu.peak(precision)))},
        {"gemm_power_limit": source(how)},
    )


def products(x: Tensor, w: Tensor, g: Tensor) -> Iterator[tuple[str, Gemm, Callable[[], Tensor]]]:
    """A linear layer's products as autograd makes them: x [m, k], w [n, k], g [m, n]."""
    (m, k), n = x.shape, w.shape[0]
    yield "forward", Gemm("product", m, n, k), lambda: x @ w.T
    yield "by input", Gemm("product", m, k, n), lambda: g @ w
    yield "by weight", Gemm("product", n, k, m, of_rows=True), lambda: g.T @ x


def by_way(timed: Sequence[Timed]) -> str:
    """The rate of each of WAYS, FLOPs over seconds: 'forward 690 TFLOP/s, ...'."""
    rates = []
    for way in WAYS:
        some = [product for product in timed if product.way == way]
        if some:
            rate = sum(p.gemm.flops for p in some) / sum(p.seconds for p in some)
            rates.append(f"{way} {format_flops(rounded(rate))}")
    return ", ".join(rates)


def _timings(
    layers: Sequence[tuple[int, int, int]], precision: str, bench: Bench, seconds: float
) -> list[Timed]:
    """Seconds of products that fit in memory and into their time, small ones first.

    On a CPU only forward products are timed.
    """
    timed: list[Timed] = []
    ways = WAYS if bench.cuda else WAYS[:1]
    each, room, dtype = seconds / len(layers) / len(ways), bench.device_memory(), DTYPES[precision]
    for m, n, k in sorted(layers, key=lambda layer: layer[0] * layer[1] * layer[2]):
        gemm = Gemm("product", m, n, k)
        rate = max((p.gemm.flops / p.seconds for p in timed), default=0.0)
        # A product runs at least three times; the smallest two layers are measured in any case.
        # Every result is as large as one of the three tensors, hence twice their memory.
        too_long = len(timed) > len(ways) and 3 * gemm.flops / rate > 4 * each
        if too_long or 2 * gemm.elements * dtype.itemsize > room:
            continue
        x, w, g = (
            torch.randn(shape, device=bench.device).to(dtype) for shape in ((m, k), (n, k), (m, n))
        )
        for way, product, work in products(x, w, g):
            if way in ways:
                timed.append(Timed(way, product, bench.median(work, each)))
    return timed


def _with_rates(
    gpu: Gpu, main: str, rates: dict[str, float], half_k: float, how: tuple[str, str]
) -> Gpu:
    """Shares of known peaks; where a peak is unknown or passed, the rate stands for it.

    On a CPU there is no datasheet: peaks are what was reached. `how` says how the rate of
    `main` was measured, and under which conditions all rates were.
    """
    what, conditions = how
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
    told = {name: source(f"{what}{conditions}") for name in values}
    if unknown:
        values["peak_flops"] = peaks
        named = ", ".join(f"{name} {format_flops(rate)}" for name, rate in unknown.items())
        told["peak_flops"] = source(
            f"rates of products, for want of a datasheet: {named}{conditions}"
        )
    if others := {name: share for name, share in shares.items() if share != shares[main]}:
        values["gemm_efficiencies"] = others
        told["gemm_efficiencies"] = source(f"two layers in each of these precisions{conditions}")
    return gpu.replaced(values, told)
