"""Attention within a sliding window, beside whole triangles and beside what the cost model says.

Usage: attention_window.py [LENGTH:WINDOW ...]. Milliseconds of a forward and of a backward of one
sequence in bf16, 32 heads of 128 and 8 of keys and values, and TFLOP/s of the pairs of tokens that
see each other; predictions for an H200 in brackets. A window of 0 is none: torch's own choice of a
kernel. Without a GPU: small ones, no times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from bigplan.cost.compute import Device, attention_seconds
from bigplan.graph.operators import Attention, doubled_reach
from bigplan.runtime.attention.fused import attention
from bigplan.spec.catalog import find_cluster

CUDA = torch.cuda.is_available()
HEADS, KV_HEADS, WIDTH = (32, 8, 128) if CUDA else (4, 2, 16)
# Mistral's window and a quarter of it; then a window that hides one token, which is the same
# kernel's whole triangle.
CASES = ("8192:4096", "16384:4096", "32768:4096", "32768:1024", "65536:4096")
WHOLE = ("8192:0", "32768:0", "32768:32767")


def milliseconds(work: Callable[[], object]) -> float:
    """The median."""
    if not CUDA:
        work()
        return 0.0
    import triton

    return float(triton.testing.do_bench(work, warmup=50, rep=200, return_mode="median"))


def measure(length: int, window: int | None, device: Device) -> None:
    """A row of the table."""
    where = "cuda" if CUDA else "cpu"
    q, k, v, gradient = (
        torch.randn(1, length, heads, WIDTH, device=where, dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    inputs = [each.requires_grad_() for each in (q, k, v)]
    with torch.no_grad():
        forward = milliseconds(lambda: attention(q, k, v, window))
    out = attention(q, k, v, window)
    backward = milliseconds(
        lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True),
    )
    flops = 2.0 * length * doubled_reach(length, window) * HEADS * WIDTH
    there = Attention("attention", flops, length=length, window=window)
    back = replace(there, flops=2.5 * flops, backward=True)
    told = f"{length:6d} {window or 'none':>6}"
    for kernel, found in ((there, forward), (back, backward)):
        rate = kernel.flops / found / 1e9 if found else 0.0
        told += f"  {found:8.3f} ({1e3 * attention_seconds(kernel, device):8.3f}) {rate:4.0f}"
    print(told, flush=True)


def main() -> None:
    """The table."""
    print(torch.__version__, torch.cuda.get_device_name() if CUDA else "no GPU: small, no times")
    print("tokens window   forward ms (priced) TFLOP/s   backward ms (priced) TFLOP/s")
    device = Device(find_cluster("h200-1x").group.gpu, "bf16")
    for case in sys.argv[1:] or ((*CASES, *WHOLE) if CUDA else ("300:100", "300:0")):
        length, window = map(int, case.split(":"))
        measure(length, window or None, device)


if __name__ == "__main__":
    main()
