"""Constants of the cost model from timings, by least squares of the logarithms.

Logarithms, because a model that is 10% off is as wrong at a microsecond as at a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bigplan.cost.collective import PATTERNS, Group, message
from bigplan.cost.compute import Device, attention_seconds, gemm_seconds
from bigplan.graph.operators import Attention, Gemm
from bigplan.spec.gpu import Gpu
from bigplan.spec.link import GpuLink, Network, Traffic

FitValues = NDArray[np.float64]

# Least value of a parameter. The search is by logarithm, and this is as good as zero.
SMALLEST = 1e-3


@dataclass(frozen=True)
class Fit:
    """Parameters, and the mean of |log(predicted / measured)| that they leave."""

    parameters: tuple[float, ...]
    error: float


def fit_log(
    predicted: Callable[[FitValues], FitValues],
    measured: Sequence[float],
    start: Sequence[float],
    most: Sequence[float],
) -> Fit:
    """Positive parameters, at most `most`, that minimise sum log(predicted / measured)^2.

    The method is Levenberg-Marquardt on the logarithms of the parameters, with differences for
    derivatives. For a few parameters and some twenty timings a library would cost more than it
    saves.
    """
    assert len(measured) >= len(start) > 0, (len(measured), len(start))
    target = np.log(np.asarray(measured, np.float64))

    def residuals(at: FitValues) -> FitValues:
        return np.log(predicted(np.exp(at))) - target

    highest = np.log(np.asarray(most, np.float64))
    at = np.clip(np.log(np.asarray(start, np.float64)), np.log(SMALLEST), highest)
    errors, damping = residuals(at), 1e-3
    for _ in range(200):
        slopes = np.stack(
            [(residuals(at + step) - errors) / 1e-5 for step in 1e-5 * np.eye(len(at))], axis=1
        )
        normal = slopes.T @ slopes
        moved = np.linalg.solve(
            normal + damping * np.diag(np.diag(normal) + 1e-9), -slopes.T @ errors
        )
        trial = np.clip(at + np.clip(moved, -2.0, 2.0), np.log(SMALLEST), highest)
        after = residuals(trial)
        if after @ after < errors @ errors:
            done = np.max(np.abs(trial - at)) < 1e-9
            at, errors, damping = trial, after, max(damping / 10, 1e-12)
            if done:
                break
        else:
            damping *= 10
            if damping > 1e12:
                break
    return Fit(tuple(float(value) for value in np.exp(at)), float(np.mean(np.abs(errors))))


@dataclass(frozen=True)
class GemmFit:
    """`rate` (FLOP/s) and K0 in rate * K / (K + K0), and the mean relative error left."""

    rate: float
    half_k: float
    error: float


def fit_gemm(gemms: Sequence[Gemm], seconds: Sequence[float], gpu: Gpu, precision: str) -> GemmFit:
    """Rate at endless K, and K0, as `gemm_seconds` has them; needs at least two products.

    `gpu` gives the formula's other figures: multiprocessors and the rate of memory traffic.
    """

    def predicted(at: FitValues) -> FitValues:
        device = Device(with_gemm_rate(gpu, precision, float(at[0]), float(at[1])), precision)
        return np.array([gemm_seconds(gemm, device) for gemm in gemms])

    start = max(gemm.flops / time for gemm, time in zip(gemms, seconds, strict=True))
    # K0 is at most the largest K measured: beyond it K0 and the rate could grow without end.
    most = 100 * start, max(gemm.k for gemm in gemms)
    fit = fit_log(predicted, seconds, (start, 100.0), most)
    rate, half_k = fit.parameters
    return GemmFit(rate, 0.0 if half_k <= 10 * SMALLEST else half_k, fit.error)


def with_gemm_rate(gpu: Gpu, precision: str, rate: float, half_k: float) -> Gpu:
    """`gpu` whose products run at `rate` times K / (K + K0); for pricing only."""
    return gpu.model_copy(
        update={
            "peak_flops": {precision: rate},
            "gemm_efficiency": 1.0,
            "gemm_power_limit": None,
            "gemm_efficiencies": None,
            "gemm_half_k": half_k,
        }
    )


def gemm_rate(
    gemms: Sequence[Gemm], seconds: Sequence[float], gpu: Gpu, precision: str, half_k: float
) -> float:
    """The rate alone, where K0 is known from another precision."""

    def predicted(at: FitValues) -> FitValues:
        device = Device(with_gemm_rate(gpu, precision, float(at[0]), half_k), precision)
        return np.array([gemm_seconds(gemm, device) for gemm in gemms])

    start = max(gemm.flops / time for gemm, time in zip(gemms, seconds, strict=True))
    return fit_log(predicted, seconds, (start,), (100 * start,)).parameters[0]


@dataclass(frozen=True)
class AttentionFit:
    """Share of the peak on an endless sequence, h in s / (s + h), and the worst relative error."""

    efficiency: float
    half_length: float  # tokens
    worst: float


def fit_attention(
    kernels: Sequence[Attention], seconds: Sequence[float], gpu: Gpu, precision: str
) -> AttentionFit:
    """Efficiency and half length of `sdpa`, as `attention_seconds` has them.

    The fit needs at least two lengths, all forward or all backward. The shorter lengths decide on
    the half length.
    """

    def predicted(at: FitValues) -> FitValues:
        device = Device(with_attention(gpu, float(at[0]), float(at[1])), precision, ("sdpa",))
        return np.array([attention_seconds(kernel, device) for kernel in kernels])

    start = float(np.max(predicted(np.array([1.0, 0.0])) / np.asarray(seconds, np.float64)))
    # As with K0: a half length beyond the longest sequence could grow with the efficiency.
    longest = max(kernel.length for kernel in kernels)
    fit = fit_log(predicted, seconds, (start, longest / 50), (100 * start, longest))
    efficiency, half_length = fit.parameters
    worst = np.max(np.abs(predicted(np.array(fit.parameters)) / np.asarray(seconds) - 1))
    return AttentionFit(efficiency, half_length if half_length >= 1 else 0.0, float(worst))


def with_attention(gpu: Gpu, efficiency: float, half_length: float) -> Gpu:
    """`gpu` whose only attention is an `sdpa` with these figures both ways; for pricing only."""
    return gpu.model_copy(
        update={
            "attention_forward_efficiency": {"sdpa": efficiency},
            "attention_backward_efficiency": {"sdpa": efficiency},
            "attention_forward_half_length": {"sdpa": half_length},
            "attention_backward_half_length": {"sdpa": half_length},
        }
    )


@dataclass(frozen=True)
class TransferFit:
    """Bytes/s of an endless transfer, and seconds of any transfer beside its bytes."""

    rate: float
    latency: float
    error: float


def fit_transfer(sizes: Sequence[int], seconds: Sequence[float]) -> TransferFit:
    """Fit latency + bytes / rate to transfers of at least two sizes."""
    nbytes = np.asarray(sizes, np.float64)
    # The search is in GB/s and microseconds, where both parameters are near 1.
    start = max(n / s for n, s in zip(sizes, seconds, strict=True)) / 1e9
    most = 100 * start, max(1e6 * min(seconds), 2 * SMALLEST)
    fit = fit_log(lambda at: at[1] / 1e6 + nbytes / (at[0] * 1e9), seconds, (start, 5.0), most)
    rate, latency = fit.parameters
    return TransferFit(rate * 1e9, 0.0 if latency <= 10 * SMALLEST else latency / 1e6, fit.error)


class Exchange(NamedTuple):
    """So many bytes exchanged among so many devices; a send goes from one to another."""

    traffic: Traffic
    ranks: int
    nbytes: int


@dataclass(frozen=True)
class LinkFit:
    """Bandwidth of each kind (bytes/s), latency (s), half size (bytes); the mean error left."""

    bandwidths: dict[Traffic, float]
    latency: float
    half_size: float
    error: float


class Inside(NamedTuple):
    """Nodes that a network joins: the GPUs of each, and the link between these GPUs."""

    per_node: int
    link: GpuLink


def fit_link(
    exchanges: Sequence[Exchange], seconds: Sequence[float], inside: Inside | None = None
) -> LinkFit:
    """A link's figures as `cost.collective` has them; needs at least two sizes of each kind.

    With `inside` it is a network between such nodes. If all groups have two ranks, latency and half
    size add the same to every message: then the fit finds a latency alone.
    """
    kinds = list(dict.fromkeys(exchange.traffic for exchange in exchanges))
    several = len({exchange.ranks for exchange in exchanges}) > 1

    def parts(at: FitValues) -> tuple[dict[Traffic, float], float, float]:
        # The search is in microseconds, MB and GB/s, where all parameters are near 1.
        half = float(at[1]) * 1e6 if several else 0.0
        rates = {kind: float(at[2 + n]) * 1e9 for n, kind in enumerate(kinds)}
        return rates, float(at[0]) / 1e6, half

    def predicted(at: FitValues) -> FitValues:
        figures = _figures(*parts(at))
        if inside is None:
            link = GpuLink.model_construct(**figures)
            return np.array([exchange_seconds(exchange, link) for exchange in exchanges])
        network = Network.model_construct(**figures)
        return np.array([seconds_between(exchange, network, inside) for exchange in exchanges])

    sent = max(e.nbytes / time for e, time in zip(exchanges, seconds, strict=True)) / 1e9
    start = (1e6 * min(seconds), 0.1, *([sent] * len(kinds)))
    most = (
        2e6 * min(seconds),
        max(e.nbytes for e in exchanges) / 1e6,
        *([100 * sent] * len(kinds)),
    )
    fit = fit_log(predicted, seconds, start, most)
    return LinkFit(*parts(np.asarray(fit.parameters)), fit.error)


def exchange_seconds(exchange: Exchange, link: GpuLink) -> float:
    """The cost model's seconds of an exchange inside a node."""
    if exchange.traffic == "send":
        return message(exchange.nbytes, link)
    group = Group(exchange.ranks, exchange.ranks, link, None, 1.0)
    return PATTERNS[exchange.traffic](exchange.nbytes, group)


def seconds_between(exchange: Exchange, network: Network, inside: Inside) -> float:
    """The cost model's seconds of a collective between whole nodes."""
    group = Group(exchange.ranks, inside.per_node, inside.link, network, 1.0)
    return PATTERNS[exchange.traffic](exchange.nbytes, group)


def _figures(rates: dict[Traffic, float], latency: float, half_size: float) -> dict[str, Any]:
    """A link's figures for pricing only, which nothing checks."""
    own = {f"{kind}_bandwidth": rate for kind, rate in rates.items() if kind != "all_reduce"}
    figures = {"bandwidth": rates["all_reduce"], "latency": latency, "half_size": half_size}
    return {"name": "fitted", "sources": {}} | figures | own
