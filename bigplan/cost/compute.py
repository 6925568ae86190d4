"""Seconds of operators on one GPU: a roofline with tiles, waves and a smooth size curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, gcd, inf

from bigplan.graph.operators import ALIGNED, Attention, Gemm, Operator, Stream, doubled_reach
from bigplan.mechanics import WIDEST_FLASH
from bigplan.spec.gpu import Divisor, FlashKernel, Gpu

# Tiles that GEMM libraries choose from, [rows, columns], and the rate each reaches beside the
# largest: a tile of m x n loads m + n per m n products, so smaller ones wait for loads.
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.65),
)
# Seconds of torch's grouped product in fp8 for matrices' gradients over those of others of as many
# FLOPs: 1.16 to 1.24 at three models' shapes on an H200, torch 2.11
# (benchmarks/results/2026-11-27-h200-experts-fp8/products.txt).
EIGHT_BITS_OF_ROWS = 1.2
# Rates of a single product by the divisor of its rows' lengths. Measured on an H100, torch 2.11: a
# layer's three products of 4096 cubed with inputs or outputs less by 4, 2 and 1
# (benchmarks/results/2026-11-25-h100-x2/alignment.txt). On an H200 products of 32,768 x 50,257 x
# 1,600 reach 0.17 (a head of gpt2-xl, benchmarks/results/2026-11-24-h200-sharded/host_time.txt).
MISALIGNED_ALONE = {4: 0.37, 2: 0.37, 1: 0.19}
DIVISORS: dict[int, Divisor] = {4: "by_4", 2: "by_2", 1: "by_1"}
ATTENTION_TILE = 128  # rows and columns of a flash attention tile, which is computed in whole
# Columns of a head that cost as much as the softmax of its scores. With FlashAttention-2 and 3 on
# an H100 at 16k tokens heads of 64 reach 0.77 to 0.90 of the rate of heads of 128 (arXiv
# 2407.08608, figures 5 and 6): 15 to 55 columns, of which 20 meets three kernels of four. The first
# FlashAttention takes smaller tiles for heads of 128, so that they gain nothing (its README).
HEAD_OVERHEAD = 20.0
NARROW_AS_FAST: tuple[FlashKernel, ...] = ("flash1",)
# torch's scaled_dot_product_attention takes no window. Through torch's other functions a window is
# FlashAttention-2's (runtime/attention/window.py).
WITHOUT_WINDOWS: FlashKernel = "sdpa"
# FlashAttention-2's seconds forward in a window over those without one, beyond what the window
# leaves: its mask is applied to every tile in place of those at the edges (Need_masking in mask.h).
# Its backward masks at the edges alone. Measured on an H100, torch 2.11, with a window that hides
# one token of 32,768, which took 1.12 of the price forward and 0.99 backward; windows of 1,024 to
# 4,096 tokens took 1.13 to 1.18 forward (benchmarks/results/2026-11-25-h100-x2/window.txt).
MASKED_TILES = 1.12
# FlashAttention-2's rate over that of the kernel that a GPU has a figure of, where it has none of
# FlashAttention-2: an estimate from that run, where it had 0.56 of the rate of torch's own forward,
# masks aside, and 0.62 of the backward.
FLASH2_OF_STAND_IN = 0.6
# No flash kernel takes heads of more columns in 16 bits. torch's memory-efficient kernel does, in
# so many times the price of FlashAttention-2, forward and backward. Measured on an H100, torch
# 2.11, 16 heads of 264 columns: 3.0 and 8.9 for four sequences of 2,048 tokens, 3.2 and 9.8 for one
# of 8,192 (benchmarks/results/2026-11-25-h100-alibi/wide.txt).
EFFICIENT_FORWARD, EFFICIENT_BACKWARD = 3.1, 9.3
# The kernel that adds linear biases is FlashAttention-2's algorithm, and priced as that where a GPU
# has no figure of it. Its backward has seven products for five
# (bigplan/kernels/handwritten/attention.py).
PRODUCTS_AGAIN = 7 / 5
# Kernels for heads of 256 columns take smaller tiles: so many times the price of heads of 128,
# forward and backward. Measured on an H200, torch 2.11, with Gemma's heads and 4,096 tokens: our
# own kernel, capping scores (benchmarks/results/2026-11-27-h200-gemma/tiles.txt); torch's, where
# windows of 1,024 tokens took 1.07 and 1.48 and none 1.08 and 1.41 (operators.txt beside it).
WIDEST_BUT_256 = 192
AT_256: Mapping[FlashKernel, tuple[float, float]] = {
    "alibi": (1.31, 1.72),
    "sdpa": (1.07, 1.44),
    "flash2": (1.07, 1.44),
}
# cuDNN's attention in a window takes 1 + c tile / w times its price, forward and backward. Windows
# of 128 tokens took 2.5 and 1.65 times on a GB200 and a GB300, 128 heads of 64 columns
# (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results, 2026-04-24). Those of 1,024 on
# an H200 took 1.19 and 1.27 times, where this is 1.19 and 1.08 (h200_919_only_cudnn there).
CUDNN_WINDOW = (1.5, 0.65)
# Seconds of its attention in MXFP8 over those in bf16, from the same tables: causal, 4,096 tokens,
# means of both GPUs, which differ by up to 0.1: 64 heads of 128 columns; 128 heads with keys of 192
# and values of 128; heads of 64 in a window of 128 tokens, which the backward takes no use of.
MXFP8_ATTENTION, MXFP8_WIDE_KEYS, MXFP8_WINDOW = (0.79, 1.09), (0.68, 0.76), (0.93, 4.35)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as operators meet it: with the precision of the run."""

    gpu: Gpu
    precision: str
    flash: tuple[FlashKernel, ...] = ("sdpa", "flash3", "flash2")  # attention, most preferred first
    gemm_share: float = 1.0  # as a framework's
    eager: float = 0.0  # as a framework's
    slowest: float = 1.0  # its seconds of arithmetic over those of the usual GPU

    @property
    def stream_rate(self) -> float:
        """Bytes/s of memory-bound kernels."""
        return self.gpu.memory_bandwidth * self.gpu.memory_efficiency

    def precision_of(self, gemm: Gemm) -> str:
        """The run's, unless the product has its own."""
        if gemm.fp4:
            return "fp4"
        return "fp8" if gemm.fp8 else "fp32" if gemm.fp32 else self.precision

    def flash_efficiency(
        self, length: float = inf, *, backward: bool, only: FlashKernel | None = None
    ) -> float:
        """Share of the peak that the run's flash attention reaches.

        efficiency x s / (s + h) for s tokens: filling and draining the pipeline of a row of tiles
        costs as much as h more tokens in it, whatever s is.
        """
        gpu, kernel = self.gpu, self.flash_kernel(backward=backward, only=only)
        if backward:
            shares, halves = gpu.attention_backward_efficiency, gpu.attention_backward_half_length
        else:
            shares, halves = gpu.attention_forward_efficiency, gpu.attention_forward_half_length
        return shares[kernel] / (1 + (halves or {}).get(kernel, 0.0) / length)

    def flash_kernel(self, *, backward: bool, only: FlashKernel | None = None) -> FlashKernel:
        """The run's kernel: `only`, or the first of its own that the GPU has."""
        gpu = self.gpu
        shares = gpu.attention_backward_efficiency if backward else gpu.attention_forward_efficiency
        liked = self.flash if only is None else (only, *self.flash)
        return next((kernel for kernel in liked if kernel in shares), next(iter(shares)))


def norm(a: float, b: float, power: float) -> float:
    """About the larger of two overlapping times; if they are close, each sometimes waits."""
    return float((a**power + b**power) ** (1 / power))


def operator_seconds(operator: Operator, device: Device) -> float:
    """Seconds that the GPU works on one operator; a collective is not priced here."""
    if isinstance(operator, Gemm):
        return gemm_seconds(operator, device)
    if isinstance(operator, Attention):
        return attention_seconds(operator, device)
    assert isinstance(operator, Stream)
    moving = operator.nbytes * chained(operator, device.eager) / device.stream_rate
    starts = launches(operator, device.eager) if operator.in_turn else 0
    return moving + starts * device.gpu.kernel_start


def chained(operator: Stream, eager: float) -> float:
    """Times the bytes, and the launches, of the operator as one kernel."""
    return 1.0 + eager * (operator.eager - 1.0)


def launches(operator: Operator, eager: float = 0.0) -> int:
    """Kernels that the host launches for an operator."""
    if isinstance(operator, Stream):
        return ceil(operator.launches * chained(operator, eager))
    return operator.launches if isinstance(operator, Gemm | Attention) else 1


def gemm_seconds(gemm: Gemm, device: Device) -> float:
    """What tiles take, or as long as the product's energy lasts where that is longer.

    A GPU at its power limit has so many joules a second, and a product's go with its FLOPs: what a
    smaller product waits for, a higher clock makes up for.
    """
    return max(tiled_seconds(gemm, device), power_seconds(gemm, device))


def power_seconds(gemm: Gemm, device: Device) -> float:
    """Seconds at the GPU's power limit; 0 where it has none."""
    return device.slowest * gemm.flops / device.gpu.power_limit(device.precision_of(gemm))


def tiled_seconds(gemm: Gemm, device: Device) -> float:
    """Arithmetic and operand traffic, added: tiles wait for their first and last bytes.

    Where tiles share a multiprocessor, one loads and stores while another multiplies, so that less
    than the sum is left: the GPU's `gemm_overlap` says how much.

    Arithmetic runs in whole tiles and waves at peak x efficiency x K / (K + K0): a tile's prologue
    and epilogue cost as much as K0 more of the inner dimension, whatever K is. Of grouped products
    each group's matrix is read once, and its rows fill tiles of their own.
    """
    gpu = device.gpu
    precision = device.precision_of(gemm)
    share = device.gemm_share * gpu.gemm_share(precision)
    rate = gpu.peak(precision) * share * gemm.inner / (gemm.inner + gpu.gemm_half_k)
    rate *= alignment(gemm, gpu, precision)
    arithmetic = device.slowest * gemm.flops * tile_waste(gemm, gpu) / rate
    if gemm.scaled_rows and gemm.of_rows:
        arithmetic *= EIGHT_BITS_OF_ROWS
    element = 4 if precision == "fp32" else 2
    return norm(arithmetic, gemm.elements * element / device.stream_rate, gpu.gemm_overlap)


def tile_waste(gemm: Gemm, gpu: Gpu) -> float:
    """Work of whole tiles over useful work, at least 1, for the best tile; one wave at least.

    The last wave's idle part is not counted: libraries split the inner dimension to fill it, and
    over the runs of a training step its loss does not show (docs/cost-model.md).
    """
    return min(_tile_waste(gemm, gpu, *tile) for tile in TILES)


def _tile_waste(gemm: Gemm, gpu: Gpu, rows: int, columns: int, relative: float) -> float:
    tiles = _tile_rows(gemm, rows) * -(-gemm.n // columns) * gemm.batch
    run = max(tiles, gpu.multiprocessors * (gemm.groups if gemm.apart else 1))
    return run * rows * columns / (gemm.results * relative)


def _tile_rows(gemm: Gemm, rows: int) -> float:
    """Rows of tiles of so many rows each, expected of groups.

    A group's rows are any number, so that its last tile is half full on average; a group that has
    any row has a tile.
    """
    if gemm.of_rows or gemm.groups == 1:
        return -(-gemm.m // rows) * gemm.groups
    groups = min(gemm.groups, gemm.m)
    return min(gemm.m, max(groups, gemm.m / rows + groups / 2))


def load_width(gemm: Gemm) -> int:
    """Elements that a load takes at once, at most 8: as many as all rows' lengths divide by."""
    return min(gcd(length, ALIGNED) for length in gemm.row_lengths)


def on_tensor_cores(gemm: Gemm, gpu: Gpu, precision: str) -> bool:
    """Whether the product is priced on tensor cores, be it with narrow loads."""
    if precision == "fp32" or not gpu.runs_kernels:
        return False
    return load_width(gemm) == ALIGNED or gemm.batch == 1 or gpu.misaligned_batches is not None


def alignment(gemm: Gemm, gpu: Gpu, precision: str) -> float:
    """Rate beside that of rows whose lengths are multiples of 8.

    Loads of single products are as wide as their rows' lengths divide: a layer's tokens may be any
    number (0.97 to 1.00 of the rate on an H100, benchmarks/results/2026-11-25-h100-x2). Batched
    products lose less on an H100. On GPUs without such a figure they run at the peak of fp32, as
    heads of 108 and 150 columns did on A100s in 2022 (the bloom tables of validate/measured.csv).
    Only tensor cores want wide loads, and fp32 has none: on a CPU, products of odd lengths had 0.91
    to 1.00 of the rate in fp32 and 0.99 to 1.01 in bf16 (benchmarks/LOG.md, 11-25).
    """
    width = load_width(gemm)
    if width == ALIGNED or precision == "fp32" or not gpu.runs_kernels:
        return 1.0
    if gemm.batch == 1:
        return MISALIGNED_ALONE[width]
    if gpu.misaligned_batches:
        return gpu.misaligned_batches[DIVISORS[width]]
    aligned = gpu.peak(precision) * gpu.gemm_share(precision)
    return min(1.0, gpu.peak_flops.get("fp32", aligned) / aligned)


def attention_seconds(attention: Attention, device: Device) -> float:
    """Fused attention: tiles on the edges are computed in whole, narrow heads wait longer for the
    softmax of their scores; efficiencies are those of heads of 128.

    A sequence has one edge, which adds half a tile to a query's s / 2 keys on average. Documents
    that are kept apart begin and end within tiles, and have more. Beyond the first w tokens, a
    window has two, which add a tile to w keys: 1 + tile / w either way. A query's row of tiles is
    as long as in a whole sequence of twice the keys that it attends to, and of one tile at least:
    within it fewer keys save nothing of a row's filling and draining.
    """
    gpu, length, bound = device.gpu, attention.length, attention.kernel
    reach = min(length, attention.window or length)
    edges, biased = 1 + attention.edges * ATTENTION_TILE / reach, bound == "alibi"
    if biased and bound != device.flash_kernel(backward=attention.backward, only=bound):
        bound = "flash2"
        edges *= PRODUCTS_AGAIN if attention.backward else 1.0
    if not biased and reach < length and WITHOUT_WINDOWS in device.flash:
        bound = "flash2"
    wide = gpu.runs_kernels and attention.head_dim > WIDEST_FLASH and device.precision != "fp32"
    if wide:
        bound = "flash2"
    kernel = device.flash_kernel(backward=attention.backward, only=bound)
    if gpu.runs_kernels and "flash2" in (bound, kernel):
        masked = reach < length and not (attention.backward or biased)
        edges *= MASKED_TILES if masked else 1.0
        edges /= FLASH2_OF_STAND_IN if kernel != "flash2" else 1.0
    if wide:
        edges *= EFFICIENT_BACKWARD if attention.backward else EFFICIENT_FORWARD
    elif gpu.runs_kernels and attention.head_dim > WIDEST_BUT_256 and kernel in AT_256:
        edges *= AT_256[kernel][attention.backward]
    if kernel == "cudnn" and reach < length:
        edges *= 1 + CUDNN_WINDOW[attention.backward] * ATTENTION_TILE / reach
    if attention.fp8:
        windowed = MXFP8_WINDOW if reach < length else MXFP8_ATTENTION
        wide_keys = attention.head_dim > 128
        edges *= (MXFP8_WIDE_KEYS if wide_keys else windowed)[attention.backward]
    columns = 0.0 if kernel in NARROW_AS_FAST else HEAD_OVERHEAD
    narrow = (1 + columns / attention.head_dim) / (1 + columns / 128)
    window = attention.window and max(attention.window, ATTENTION_TILE)
    row = doubled_reach(length, window) / attention.fills
    efficiency = device.flash_efficiency(row, backward=attention.backward, only=bound)
    rate = gpu.peak(device.precision) * efficiency / device.slowest
    return max(attention.flops * edges * narrow / rate, attention.nbytes / device.stream_rate)
