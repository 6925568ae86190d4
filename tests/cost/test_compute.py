from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigplan.cost.compute import (
    ATTENTION_TILE,
    FLASH2_OF_STAND_IN,
    HEAD_OVERHEAD,
    MASKED_TILES,
    MISALIGNED_ALONE,
    TILES,
    WITHOUT_WINDOWS,
    Device,
    alignment,
    attention_seconds,
    gemm_seconds,
    launches,
    norm,
    operator_seconds,
    tile_waste,
)
from bigplan.cost.framework import FSDP, MEGATRON_CORE, NATIVE
from bigplan.errors import InputError
from bigplan.graph.operators import Attention, Gemm, Stream, by_input_and_weight, doubled_reach
from bigplan.spec.gpu import FlashKernel, find_gpu, list_gpus

H200 = find_gpu("h200-sxm")
DEVICE = Device(H200, "bf16")
# At one clock, whatever power that takes.
UNLIMITED = Device(H200.without("gemm_power_limit"), "bf16")
RELATIVE = {tile[:2]: tile[2] for tile in TILES}
SIZE = st.integers(1, 8192)


def _with_multiprocessors(number: int) -> Device:
    return Device(H200.model_copy(update={"multiprocessors": number}), "bf16")


# --- matrix products


def test_a_precision_with_an_efficiency_of_its_own() -> None:
    measured = H200.replaced(
        {"gemm_efficiencies": {"fp32": 0.5}}, {"gemm_efficiencies": "measured"}
    )
    large = Gemm("large", 65536, 65536, 65536)  # next to no traffic
    for precision, share in (("fp32", 0.5), ("bf16", H200.gemm_efficiency)):
        seconds = gemm_seconds(large, Device(measured, precision))
        plain = gemm_seconds(large, Device(H200, precision))
        assert plain / seconds == pytest.approx(share / H200.gemm_efficiency, rel=0.02)


def test_a_large_product_is_its_arithmetic_and_its_traffic() -> None:
    large = Gemm("w", 8192, 8192, 8192)
    assert tile_waste(large, H200) == 1.0
    rate = H200.peak("bf16") * H200.gemm_efficiency * 8192 / (8192 + H200.gemm_half_k)
    traffic = 3 * 8192**2 * 2 / (H200.memory_bandwidth * H200.memory_efficiency)
    # They add up, for the first and last tiles have nothing to hide behind.
    assert gemm_seconds(large, UNLIMITED) == pytest.approx(large.flops / rate + traffic)
    assert traffic < 0.1 * gemm_seconds(large, UNLIMITED)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_that_fill_the_gpu_take_as_long_as_their_energy(precision: str) -> None:
    """By size until the power limit, and by their FLOPs from there on; in 16 bits alone."""
    limited, free = (replace(d, precision=precision) for d in (DEVICE, UNLIMITED))
    small, large = Gemm("small", 4096, 4096, 4096), Gemm("large", 16384, 28672, 8192)
    assert gemm_seconds(small, limited) == gemm_seconds(small, free)
    rate = large.flops / gemm_seconds(large, limited)
    assert H200.gemm_power_limit
    assert rate == pytest.approx(H200.gemm_power_limit * H200.peak(precision))
    assert rate < large.flops / gemm_seconds(large, free)
    for other in ("fp8", "fp32"):
        both = (gemm_seconds(large, replace(d, precision=other)) for d in (DEVICE, UNLIMITED))
        assert next(both) == next(both)


def test_where_tiles_share_a_multiprocessor_traffic_runs_beside() -> None:
    """cuBLAS on an L20, 92 of the RTX 4090's multiprocessors (DefTruth/CUDA-Learn-Notes)."""
    l20 = {"peak_flops": {"fp16": 119.5e12}, "gemm_efficiency": 0.985, "gemm_efficiencies": None}
    l20 |= {"multiprocessors": 92, "memory_bandwidth": 864e9}
    gpu = find_gpu("rtx-4090").model_copy(update=l20)
    apart = gpu.model_copy(update={"gemm_overlap": 1.0})
    for k, measured in ((2048, 4.767e-3), (4096, 9.454e-3), (8192, 18.835e-3)):
        product = Gemm("w", 16384, 8192, k)
        assert gemm_seconds(product, Device(gpu, "fp16")) == pytest.approx(measured, rel=0.005)
        assert gemm_seconds(product, Device(apart, "fp16")) > 1.04 * measured


def test_a_thin_product_is_bound_by_memory() -> None:
    thin = Gemm("w", 8, 8192, 8192)
    traffic = (8 * 8192 + 8192**2 + 8 * 8192) * 2 / DEVICE.stream_rate
    assert traffic < gemm_seconds(thin, DEVICE) < 2 * traffic


def test_a_longer_inner_dimension_is_more_efficient_without_a_cliff() -> None:
    each = [gemm_seconds(Gemm("w", 4096, 4096, k), DEVICE) / k for k in range(64, 8192, 64)]
    assert each == sorted(each, reverse=True)
    gains = [before - after for before, after in pairwise(each)]
    assert gains == sorted(gains, reverse=True)  # ever less is gained: no step


def test_partial_tiles_do_whole_work() -> None:
    one = _with_multiprocessors(1).gpu
    # 129 rows by 128 columns fill two tiles of 128 rows, one of 256 or three of 64.
    by_hand = min(
        256 / 129 / RELATIVE[256, 128],
        256 / 129 / RELATIVE[128, 128],
        256 / 129 / RELATIVE[128, 64],
        192 / 129 / RELATIVE[64, 128],
        192 / 129 / RELATIVE[64, 64],
    )
    assert tile_waste(Gemm("w", 129, 128, 64), one) == pytest.approx(by_hand)
    assert by_hand > 1.4
    assert tile_waste(Gemm("w", 256, 128, 64), one) == 1.0


def test_a_grid_smaller_than_the_gpu_leaves_it_idle() -> None:
    gpu = _with_multiprocessors(100).gpu
    # Eight tiles of 64 x 64 are the most there are for 256 x 128, on 100 multiprocessors.
    assert tile_waste(Gemm("w", 256, 128, 64), gpu) == pytest.approx(100 / 8 / RELATIVE[64, 64])
    # A batch of products fills it, and so does one multiprocessor.
    assert tile_waste(Gemm("w", 256, 128, 64, batch=100), gpu) == 1.0
    assert tile_waste(Gemm("w", 256, 128, 64), _with_multiprocessors(1).gpu) == 1.0


def test_the_last_wave_is_not_rounded_up() -> None:
    """101 tiles on 100 multiprocessors: libraries split the inner dimension to fill the GPU."""
    gpu = _with_multiprocessors(100).gpu
    assert tile_waste(Gemm("w", 256 * 101, 128, 64), gpu) == 1.0


@given(SIZE, SIZE, st.integers(1, 64))
def test_tiles_never_do_less_than_the_product(m: int, n: int, batch: int) -> None:
    assert tile_waste(Gemm("w", m, n, 8, batch), H200) >= 1.0


@pytest.mark.parametrize("name", list_gpus())
@given(m=SIZE, n=SIZE, k=SIZE, batch=st.integers(1, 128))
def test_no_product_beats_the_roofline(name: str, m: int, n: int, k: int, batch: int) -> None:
    gpu = find_gpu(name)
    for precision in gpu.peak_flops:
        fp8 = precision == "fp8"
        if fp8 and "bf16" not in gpu.peak_flops:
            continue
        device, gemm = Device(gpu, "bf16" if fp8 else precision), Gemm("w", m, n, k, batch, fp8=fp8)
        seconds = gemm_seconds(gemm, device)
        # GeForce cards exceed the clock of their nominal peak.
        assert gemm.flops / seconds <= gpu.peak(precision) * max(1.0, gpu.gemm_share(precision))
        moved = gemm.elements * (4 if precision == "fp32" else 2)
        assert moved / seconds <= gpu.memory_bandwidth
        three = gemm_seconds(Gemm("w", m, n, k, batch, count=3, fp8=fp8), device)
        assert three == pytest.approx(3 * seconds)


def _alignment(gemm: Gemm) -> float:
    return alignment(gemm, H200, "bf16")


@pytest.mark.parametrize("odd", [107, 108, 110, 150])
def test_loads_that_are_not_16_bytes_wide_are_slow(odd: int) -> None:
    even = -(-odd // 8) * 8
    assert even % 8 == 0
    narrow, wide = (Gemm("scores", 2048, 2048, k, 64) for k in (odd, even))
    a100 = find_gpu("a100-sxm4-80gb")
    # Its arithmetic is that of cores which are no tensor cores.
    rate = alignment(narrow, a100, "bf16") * a100.gemm_share("bf16") * a100.peak("bf16")
    assert rate == pytest.approx(a100.peak("fp32"))
    # The wider head does more arithmetic in less time.
    assert narrow.flops < wide.flops
    for gpu, slower in ((a100, 2), (H200, 1.3)):
        assert alignment(wide, gpu, "bf16") == 1.0
        assert alignment(narrow, gpu, "fp32") == 1.0
        device = Device(gpu, "bf16")
        assert gemm_seconds(narrow, device) > slower * gemm_seconds(wide, device)


@pytest.mark.parametrize("length", [2044, 2046, 2047])
def test_only_tensor_cores_want_wide_loads(length: int) -> None:
    """As measured on a CPU; a GPU's fp32 is computed by other cores."""
    cpu = H200.model_copy(update={"device": "cpu"})
    for gemm in (Gemm("alone", 64, length, length), Gemm("batch", 64, length, length, batch=8)):
        assert alignment(gemm, H200, "bf16") < 0.5
        assert alignment(gemm, H200, "fp32") == 1.0
        assert alignment(gemm, cpu, "bf16") == 1.0


@pytest.mark.parametrize(
    ("length", "width", "rates"),
    [
        (2044, 128, (0.447, 0.783)),
        (2046, 128, (0.442, 0.776)),
        (2047, 128, (0.254, 0.456)),
        (2048, 124, (0.420, 0.781)),
        (2048, 126, (0.429, 0.798)),
        (2048, 125, (0.303, 0.412)),
    ],
)
def test_scores_and_values_of_odd_shapes_take_what_an_h100_took(
    length: int, width: int, rates: tuple[float, float]
) -> None:
    """Parts of 274 and 285 TFLOP/s, the rates of 2,048 tokens and 128 columns, for 64 heads."""
    scores = Gemm("scores", length, length, width, batch=64)
    values = Gemm("weighted values", length, width, length, batch=64)
    took = scores.flops * (1 / 274e12 / rates[0] + 1 / 285e12 / rates[1])
    h100 = Device(find_gpu("h100-sxm-80gb"), "bf16")
    assert gemm_seconds(scores, h100) + gemm_seconds(values, h100) == pytest.approx(took, rel=0.06)


@pytest.mark.parametrize("shape", [(4, 8, 8), (8, 4, 8), (8, 8, 4)])
def test_every_row_must_divide(shape: tuple[int, int, int]) -> None:
    """Rows of a product's inputs and output: tokens are none, by weight neither."""
    forward, by_weight = Gemm("w", *shape), Gemm("w", *shape, of_rows=True)
    assert (_alignment(forward) == 1.0) is (forward.m == 4)
    assert (_alignment(by_weight) == 1.0) is (by_weight.k == 4)
    for gemm in (forward, by_weight):
        assert _alignment(gemm) in (1.0, MISALIGNED_ALONE[4])
    assert H200.misaligned_batches is not None
    assert _alignment(Gemm("w", *shape, batch=2)) == H200.misaligned_batches["by_4"]
    assert _alignment(Gemm("w", 8, 16, 24)) == 1.0


def test_a_layer_s_tokens_may_be_any_number() -> None:
    odd, even = (
        sum(gemm_seconds(gemm, DEVICE) for gemm in (forward, *by_input_and_weight((forward,))))
        for forward in (Gemm("w", tokens, 4096, 4096) for tokens in (2047, 2048))
    )
    assert odd == pytest.approx(even, rel=1e-2)


def test_narrower_loads_are_slower() -> None:
    rates = [_alignment(Gemm("w", 4096, n, 4096)) for n in (4096, 4100, 4098, 4097)]
    assert rates == sorted(rates, reverse=True)
    assert rates[1:] == list(MISALIGNED_ALONE.values())


def test_experts_in_fp8_take_what_an_h200_took() -> None:
    """Mixtral 8x7B's and GPT-OSS-20B's, 16,384 tokens, from 2026-11-27-h200-experts-fp8."""
    device = Device(H200, "bf16")
    for shape, groups, took in (
        ((32768, 14336, 4096), 8, (3.348e-3, 3.305e-3, 3.986e-3)),
        ((65536, 2880, 2880), 32, (1.123e-3, 1.124e-3, 1.263e-3)),
    ):
        gemm = Gemm("up", *shape, fp8=True, groups=groups, scaled_rows=True)
        for one, seconds in zip((gemm, *by_input_and_weight((gemm,))), took, strict=True):
            assert gemm_seconds(one, device) == pytest.approx(seconds, rel=0.11)


def test_fp8_products_run_at_the_peak_of_fp8() -> None:
    low, plain = (Gemm("w", 8192, 8192, 8192, fp8=fp8) for fp8 in (True, False))
    gain = gemm_seconds(plain, DEVICE) / gemm_seconds(low, DEVICE)
    assert 1.5 < gain < H200.peak("fp8") / H200.peak("bf16")
    with pytest.raises(InputError, match="states no peak for fp8"):
        gemm_seconds(low, Device(find_gpu("a100-sxm4-80gb"), "bf16"))


# --- attention


@pytest.mark.parametrize("backward", [False, True])
def test_attention_reaches_its_share_of_the_peak_on_long_sequences(backward: bool) -> None:
    flops = H200.peak("bf16")
    seconds = attention_seconds(Attention("attention", flops, backward=backward), DEVICE)
    # What the diagonal and the half length cost is next to nothing at 2^20 tokens.
    assert seconds == pytest.approx(1 / DEVICE.flash_efficiency(backward=backward), rel=2e-3)


LENGTHS = st.integers(128, 10**6)
HALF_LENGTHS = st.floats(0, 10**4)


def _with_half_lengths(forward: float, backward: float) -> Device:
    lengths = {
        "attention_forward_half_length": {"sdpa": forward},
        "attention_backward_half_length": {"sdpa": backward},
    }
    return Device(H200.replaced(lengths, dict.fromkeys(lengths, "measured")), "bf16")


def _of_length(length: int, *, backward: bool = False) -> Attention:
    return Attention("attention", 1e12, length=length, backward=backward)


@given(LENGTHS, LENGTHS, HALF_LENGTHS)
def test_longer_sequences_amortise_the_diagonal_and_the_pipeline(
    a: int, b: int, half: float
) -> None:
    short, long = sorted((a, b))
    device = _with_half_lengths(half, 0.0)
    first, second = (attention_seconds(_of_length(s), device) for s in (short, long))
    assert second <= first
    diagonal = (1 + ATTENTION_TILE / short) / (1 + ATTENTION_TILE / long)
    pipeline = (long / (long + half)) / (short / (short + half))
    assert first / second == pytest.approx(diagonal * pipeline)


@given(LENGTHS, HALF_LENGTHS, HALF_LENGTHS, st.booleans())
def test_each_way_has_its_half_length(s: int, there: float, back: float, backward: bool) -> None:
    found = attention_seconds(_of_length(s, backward=backward), _with_half_lengths(there, back))
    without = attention_seconds(_of_length(s, backward=backward), _with_half_lengths(0.0, 0.0))
    half = back if backward else there
    assert found / without == pytest.approx((s + half) / s)


@given(LENGTHS, st.booleans())
def test_without_a_half_length_the_efficiency_is_the_same_at_any_length(
    s: int, backward: bool
) -> None:
    gpu = find_gpu("rtx-4090")
    assert gpu.attention_forward_half_length is None is gpu.attention_backward_half_length
    device = Device(gpu, "bf16", ("flash2",))
    efficiency = device.flash_efficiency(backward=backward)
    assert device.flash_efficiency(s, backward=backward) == efficiency
    by_hand = 1e12 * (1 + ATTENTION_TILE / s) / (gpu.peak("bf16") * efficiency)
    found = attention_seconds(_of_length(s, backward=backward), device)
    assert found == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("batch", "length", "backward", "milliseconds"),
    [
        (8, 4096, False, 1.986),
        (8, 4096, True, 6.052),
        (1, 32768, False, 14.855),
        (1, 32768, True, 41.395),
    ],
)
def test_the_h200_meets_timings_that_its_figures_do_not_come_from(
    batch: int, length: int, backward: bool, milliseconds: float
) -> None:
    """Rows without a backend in benchmarks/results/2026-11-21-h200-kernels/kernels.txt."""
    flops = 2.0 * batch * 32 * length**2 * 128 * (2.5 if backward else 1.0)
    kernel = Attention("attention", flops, backward=backward, length=length)
    # Those were bursts; the figures were reached under load, at a lower clock.
    assert attention_seconds(kernel, DEVICE) == pytest.approx(milliseconds / 1e3, rel=0.08)


@given(LENGTHS, LENGTHS, HALF_LENGTHS)
def test_within_a_window_a_kernel_is_as_slow_as_with_rows_and_edges_of_its_length(
    window: int, length: int, half: float
) -> None:
    halves = {"attention_forward_half_length": {"flash2": half}}
    device = Device(H200.replaced(halves, dict.fromkeys(halves, "measured")), "bf16", ("flash2",))
    found, whole = (
        attention_seconds(Attention("attention", 1e12, length=length, window=w), device)
        for w in (window, None)
    )
    if window >= length:
        assert found == whole
        return
    # A long sequence has rows of twice the window: two edges of half a tile each.
    row = 2 * window - window**2 / length
    by_hand = MASKED_TILES * (1 + ATTENTION_TILE / window) * (row + half) / row
    assert found / whole == pytest.approx(
        by_hand / ((1 + ATTENTION_TILE / length) * (length + half) / length)
    )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("flash", "within"),
    [
        (NATIVE.attention, "flash2"),  # torch's own choice on an H200, cuDNN's, takes no window
        (MEGATRON_CORE.attention, "cudnn"),
        (FSDP.attention, "flash2"),
    ],
)
def test_a_window_has_a_kernel_that_knows_windows(
    flash: tuple[FlashKernel, ...], within: FlashKernel, backward: bool
) -> None:
    kernel = Attention("attention", 1e12, backward=backward, length=8192, window=4096)
    found = attention_seconds(kernel, Device(H200, "bf16", flash))
    assert found == attention_seconds(kernel, Device(H200, "bf16", (within,)))
    whole = replace(kernel, window=8192)
    assert attention_seconds(whole, Device(H200, "bf16", flash)) == attention_seconds(
        whole, Device(H200, "bf16", (flash[0],))
    )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("known", ["sdpa", "cudnn"])
def test_where_flash2_has_no_figure_a_window_is_slower_than_by_the_kernel_that_has_one(
    known: FlashKernel, backward: bool
) -> None:
    tables = {
        f"attention_{way}_{what}": {known: getattr(H200, f"attention_{way}_{what}")[known]}
        for way in ("forward", "backward")
        for what in ("efficiency", "half_length")
    }
    gpu = H200.replaced(tables, dict.fromkeys(tables, "measured"))
    kernel = Attention("attention", 1e12, backward=backward, length=8192, window=4096)
    found = attention_seconds(kernel, Device(gpu, "bf16", NATIVE.attention))
    masks = 1.0 if backward else MASKED_TILES
    by_other = attention_seconds(kernel, Device(gpu, "bf16", (known,)))
    if known != WITHOUT_WINDOWS:  # which has itself no other kernel
        assert found == pytest.approx(by_other * masks / FLASH2_OF_STAND_IN)
    # The H200's own figures of flash2 say about the same; their half lengths are shorter.
    own = attention_seconds(kernel, Device(H200, "bf16", NATIVE.attention))
    assert found == pytest.approx(own, rel=0.15)
    # Parts of a CPU have one kernel, which its profile measured.
    cpu = gpu.model_copy(update={"device": "cpu"})
    assert attention_seconds(kernel, Device(cpu, "bf16", NATIVE.attention)) < found


@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "rtx-4090"])
def test_linear_biases_without_a_figure_are_as_fast_as_flash2_but_for_products_again(
    name: str, window: int | None
) -> None:
    """Seven products for five backward. It masks tiles at a window's edges alone."""
    device = Device(find_gpu(name), "bf16", NATIVE.attention)
    for backward, more in ((False, 1.0), (True, 7 / 5)):
        kernel = Attention("attention", 1e12, length=8192, window=window, backward=backward)
        plain = replace(kernel, kernel="flash2")
        masks = MASKED_TILES if window and not backward else 1.0
        found = attention_seconds(replace(kernel, kernel="alibi"), device)
        assert found == pytest.approx(attention_seconds(plain, device) * more / masks)


@pytest.mark.parametrize(
    ("length", "heads", "width", "window", "forward", "backward"),
    [
        (2048, 32, 128, None, 0.412, 1.281),  # one of three that the figures are from
        (2048, 64, 64, None, 0.432, 1.344),
        (8192, 32, 128, 1024, 0.424, 1.396),
        (2048, 32, 128, 512, 0.256, 0.863),
    ],
)
def test_an_h100_takes_for_linear_biases_what_is_priced(
    length: int, heads: int, width: int, window: int | None, forward: float, backward: float
) -> None:
    """Milliseconds of 8,192 tokens in benchmarks/results/2026-11-25-h100-alibi/times.txt.

    Narrow heads are priced 9% too slow, backwards in windows up to 10% too fast.
    """
    device = Device(find_gpu("h100-sxm-80gb"), "bf16", NATIVE.attention)
    flops = 2.0 * 8192 * doubled_reach(length, window) * heads * width
    kernel = Attention("attention", flops, 0.0, False, width, length, "alibi", window)
    again = replace(kernel, flops=2.5 * flops, backward=True)
    assert 1e3 * attention_seconds(kernel, device) == pytest.approx(forward, rel=0.1)
    assert 1e3 * attention_seconds(again, device) == pytest.approx(backward, rel=0.11)


@pytest.mark.parametrize(
    ("sequences", "length", "forward", "backward"),
    [(4, 2048, 1.57, 12.75), (1, 8192, 6.10, 49.6)],
)
@pytest.mark.parametrize("bound", [None, "flash2"])
def test_heads_wider_than_flash_attention_takes_are_slow(
    sequences: int, length: int, forward: float, backward: float, bound: FlashKernel | None
) -> None:
    """Milliseconds of 16 heads of 264 columns, computed as 320, less the copies' price.

    benchmarks/results/2026-11-25-h100-alibi/wide.txt; the constants are from these rows.
    """
    device = Device(find_gpu("h100-sxm-80gb"), "bf16", NATIVE.attention)
    flops = 2.0 * sequences * length * length * 16 * 320
    kernel = Attention("attention", flops, 0.0, False, 320, length, bound)
    again = replace(kernel, flops=2.5 * flops, backward=True)
    assert 1e3 * attention_seconds(kernel, device) == pytest.approx(forward, rel=0.06)
    assert 1e3 * attention_seconds(again, device) == pytest.approx(backward, rel=0.06)


@pytest.mark.parametrize(
    ("length", "window", "forward", "backward"),
    [
        (8192, 4096, 1.504, 3.644),
        (16384, 4096, 3.403, 8.073),
        (32768, 4096, 7.362, 18.943),
        (32768, 1024, 2.266, 5.864),
        (65536, 4096, 14.915, 36.995),
        (16384, 2047, 1.963, 4.627),
    ],
)
def test_an_h100_takes_in_a_window_what_is_priced(
    length: int, window: int, forward: float, backward: float
) -> None:
    """Milliseconds of 32 heads of 128 in benchmarks/results/2026-11-25-h100-x2/window.txt.

    None of these rows is in a constant. One of 4,096 tokens took 0.45 ms, a fifth more than priced.
    """
    flops = 2.0 * length * doubled_reach(length, window) * 32 * 128
    h100 = Device(find_gpu("h100-sxm-80gb"), "bf16", NATIVE.attention)
    kernel = Attention("attention", flops, length=length, window=window)
    again = replace(kernel, flops=2.5 * flops, backward=True)
    assert attention_seconds(kernel, h100) == pytest.approx(forward / 1e3, rel=0.06)
    assert attention_seconds(again, h100) == pytest.approx(backward / 1e3, rel=0.12)


@given(st.integers(1024, 8192), st.integers(2, 64), st.booleans())
def test_a_window_takes_less_time_than_the_whole_triangle(
    window: int, times: int, backward: bool
) -> None:
    """By the same kernel, for windows as long as sequences whose attention was measured."""
    device = Device(H200, "bf16", ("flash2",))
    length = window * times
    seconds = [
        attention_seconds(
            Attention(
                "attention",
                1e9 * length * doubled_reach(length, w),
                backward=backward,
                length=length,
                window=w,
            ),
            device,
        )
        for w in (window, None)
    ]
    assert seconds[0] < seconds[1]


def test_narrow_heads_wait_for_the_softmax() -> None:
    by_width = {
        width: attention_seconds(Attention("attention", 1e12, head_dim=width), DEVICE)
        for width in (32, 64, 128, 256)
    }
    assert list(by_width.values()) == sorted(by_width.values(), reverse=True)
    expected = (1 + HEAD_OVERHEAD / 64) / (1 + HEAD_OVERHEAD / 128)
    assert by_width[64] / by_width[128] == pytest.approx(expected)


@pytest.mark.parametrize("name", list_gpus())
@pytest.mark.parametrize("backward", [False, True])
def test_no_window_is_slower_than_a_wider_one(name: str, backward: bool) -> None:
    """A window leaves w - w^2 / 2 s of a token's keys on average, which decides the FLOPs."""
    device, length = Device(find_gpu(name), "fp16", NATIVE.attention), 8192
    seconds = [
        attention_seconds(
            Attention(
                "attention", 1e8 * doubled_reach(length, window), backward=backward, length=length,
                window=window,
            ),
            device,
        )
        for window in (1, 2, 16, 32, 48, 64, 96, 127, 128, 192, 256, 1024, 4096)
    ]  # fmt: skip
    assert seconds == sorted(seconds)


def test_attention_of_few_tokens_is_bound_by_memory() -> None:
    assert attention_seconds(Attention("attention", 1.0, 1e9), DEVICE) == pytest.approx(
        1e9 / DEVICE.stream_rate
    )


@pytest.mark.parametrize("name", list_gpus())
def test_no_attention_beats_the_roofline(name: str) -> None:
    gpu = find_gpu(name)
    for precision in gpu.peak_flops:
        for kernel in gpu.attention_forward_efficiency:
            for backward in (False, True):
                if precision == "fp8":
                    continue
                device = Device(gpu, precision, (kernel,))
                seconds = attention_seconds(Attention("attention", 1e12, backward=backward), device)
                assert 1e12 / seconds <= gpu.peak(precision)


def test_a_run_takes_the_first_kernel_it_likes_that_the_gpu_has() -> None:
    tables = {"attention_forward_efficiency": {"flash2": 0.25, "flash3": 0.5}}
    gpu = H200.model_copy(update=tables)
    assert Device(gpu, "bf16", ("flash3", "flash2")).flash_efficiency(backward=False) == 0.5
    assert Device(gpu, "bf16", ("flash2", "flash3")).flash_efficiency(backward=False) == 0.25
    assert Device(gpu, "bf16", ("sdpa", "flash2")).flash_efficiency(backward=False) == 0.25


@pytest.mark.parametrize(("kernel", "slower"), [("flash1", 1.0), ("flash2", 1.135)])
def test_narrow_heads_wait_for_the_softmax_but_in_the_first_version(
    kernel: FlashKernel, slower: float
) -> None:
    device = Device(find_gpu("a100-sxm4-80gb"), "bf16", (kernel,))
    narrow, wide = (
        attention_seconds(Attention("attention", 1e12, length=2048, head_dim=width), device)
        for width in (64, 128)
    )
    assert narrow / wide == pytest.approx(slower, rel=1e-3)


# --- the rest


def test_memory_bound_operators_take_their_bytes() -> None:
    rate = H200.memory_bandwidth * H200.memory_efficiency
    assert DEVICE.stream_rate == rate
    assert operator_seconds(Stream("norm", rate, eager=3.0), DEVICE) == pytest.approx(1.0)
    apart = operator_seconds(Stream("norm", rate, eager=3.0), replace(DEVICE, eager=1.0))
    assert apart == pytest.approx(3.0)
    half = operator_seconds(Stream("norm", rate, eager=3.0), replace(DEVICE, eager=0.5))
    assert half == pytest.approx(2.0)


def test_kernels_in_turn_wait_for_each_start() -> None:
    """Three for each cast of a product's factors: what they read is nothing beside it."""
    start = DEVICE.gpu.kernel_start
    one = Stream("cast", 0.0, launches=6, eager=2.0, in_turn=True)
    assert operator_seconds(one, DEVICE) == pytest.approx(6 * start)
    assert operator_seconds(one, replace(DEVICE, eager=1.0)) == pytest.approx(12 * start)
    assert operator_seconds(replace(one, in_turn=False), DEVICE) == 0


def test_launches_by_operator() -> None:
    assert launches(Gemm("w", 1, 1, 1, batch=9, count=4)) == 4
    assert launches(Attention("attention", 1.0)) == 1
    stream = Stream("norm", 1.0, launches=2, eager=2.2)
    assert (launches(stream), launches(stream, 1.0)) == (2, 5)  # 4.4 rounded up


@given(st.floats(0.0, 1e3), st.floats(0.0, 1e3), st.floats(1.0, 20.0))
def test_a_norm_is_between_the_larger_and_the_sum(a: float, b: float, power: float) -> None:
    found = norm(a, b, power)
    slack = 1e-9 * (a + b) + 1e-12
    assert max(a, b) - slack <= found <= a + b + slack
    assert found < inf


def test_all_wait_for_the_slowest_of_many_gpus() -> None:
    gpu = find_gpu("h100-sxm-80gb")
    assert gpu.slowest(1) == pytest.approx(1.0)
    # The expected largest of 8, 128 and 1,024 normal values: 1.42, 2.58 and 3.22 deviations.
    for gpus, deviations in ((8, 1.42), (128, 2.58), (1024, 3.22)):
        assert gpu.slowest(gpus) == pytest.approx(1 + deviations * gpu.spread, abs=0.001)
    assert gpu.model_copy(update={"device": "cpu"}).slowest(8) == 1.0
    product = Gemm("a", 4096, 4096, 4096)
    alone, among = (Device(gpu, "bf16", slowest=gpu.slowest(n)) for n in (1, 1024))
    large = Gemm("a", 16384, 16384, 16384)  # at the power limit, which the slowest reaches first
    both = gemm_seconds(large, among) / gemm_seconds(large, alone)
    assert both == pytest.approx(gpu.slowest(1024))
    traffic = product.elements * 2 / alone.stream_rate  # memory's clock is the same in all
    slower = (gemm_seconds(product, among) - traffic) / (gemm_seconds(product, alone) - traffic)
    assert slower == pytest.approx(gpu.slowest(1024))


# --- products of groups of rows


@given(SIZE, SIZE, SIZE)
def test_one_group_is_a_single_product(m: int, n: int, k: int) -> None:
    plain = Gemm("p", m, n, k)
    for one in (plain, *by_input_and_weight((plain,))):
        assert gemm_seconds(replace(one, groups=1), DEVICE) == gemm_seconds(one, DEVICE)


@given(st.integers(1, 2**16), st.integers(1, 1024), st.integers(1, 1024), st.integers(2, 128))
def test_groups_never_cost_less_than_one_product_of_all_rows(
    m: int, n: int, k: int, groups: int
) -> None:
    one = Gemm("p", m, 8 * n, 8 * k)
    for plain, grouped in zip(
        (one, *by_input_and_weight((one,))),
        (replace(one, groups=groups), *by_input_and_weight((replace(one, groups=groups),))),
        strict=True,
    ):
        assert grouped.flops == plain.flops
        assert grouped.elements >= plain.elements
        together = gemm_seconds(grouped, DEVICE)
        assert gemm_seconds(replace(grouped, apart=True), DEVICE) >= together
        if not plain.of_rows:  # there groups are shorter tiles, of which more run at once
            # Half a tile is what a group wastes on average, where one product may waste a whole.
            assert together >= gemm_seconds(plain, DEVICE) * (1 - 128 / (m + 128))


def test_rows_of_a_group_fill_tiles_by_themselves() -> None:
    """Of 512 rows of each of 128 groups tiles of 128 rows are 4.5 on average."""
    grouped = Gemm("p", 65536, 1024, 2048, groups=128)
    assert tile_waste(grouped, H200) == pytest.approx(4.5 / 4)
    wide = replace(grouped, groups=8)
    assert tile_waste(wide, H200) == pytest.approx(1 + 8 / 2 / 512)  # tiles of 128 by 256
    few = Gemm("p", 128, 4096, 4096, groups=128)  # a row each: no tile is smaller than 64 rows
    assert tile_waste(few, H200) == pytest.approx(64 / RELATIVE[64, 128])


def test_a_group_of_few_rows_takes_as_long_as_its_matrix_is_read() -> None:
    few = Gemm("p", 8, 4096, 4096, groups=8)
    matrices = 8 * 4096 * 4096 * 2
    assert gemm_seconds(few, DEVICE) > matrices / DEVICE.stream_rate


def test_a_launch_for_each_group_has_a_wave_for_each() -> None:
    together = Gemm("p", 1024, 512, 512, groups=64)
    apart = replace(together, apart=True)
    assert (launches(together), launches(apart)) == (1, 64)
    assert tile_waste(apart, H200) > 10 * tile_waste(together, H200)
