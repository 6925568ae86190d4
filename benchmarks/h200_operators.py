"""Operators on one GPU, measured beside the cost model's prediction. Usage: h200_operators.py"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bigplan.cost.compute import Device, attention_seconds, gemm_seconds
from bigplan.graph.operators import Attention, Gemm
from bigplan.spec.cluster import find_gpu

DEVICE = Device(find_gpu("h200-sxm"), "bf16")
GEMMS = [
    (m, n, k)
    for m in (2048, 8192, 16384)
    for n, k in (
        (6144, 4096),
        (4096, 4096),
        (28672, 4096),
        (4096, 14336),
        (12288, 4096),
        (5120, 5120),
        (2048, 2048),
        (1024, 8192),
        (8192, 1024),
    )
] + [(8192, 128256, 4096), (4096, 4100, 4096), (4096, 4096, 4090), (4096, 4097, 4096)]
sdpa = torch.nn.functional.scaled_dot_product_attention
LENGTHS = ((8, 1024), (2, 4096), (1, 8192), (1, 32768))


def seconds_of(work: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of a call, by events, after warming up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[len(times) // 2]


def main() -> None:
    """Print a table of products, then one of attention."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        f"{'m':>6s} {'n':>7s} {'k':>6s} {'measured us':>12s} {'TFLOP/s':>8s} {'predicted us':>13s}"
    )
    for m, n, k in GEMMS:
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        measured = seconds_of(lambda a=a, b=b: a @ b.T)
        gemm = Gemm("product", m, n, k)
        print(
            f"{m:6d} {n:7d} {k:6d} {1e6 * measured:12.1f} {gemm.flops / measured / 1e12:8.1f} "
            f"{1e6 * gemm_seconds(gemm, DEVICE):13.1f}"
        )
    print(f"{'batch':>6s} {'length':>7s} {'way':>9s} {'measured us':>12s} {'predicted us':>13s}")
    for batch, length in LENGTHS:
        q = torch.randn(batch, 32, length, 128, device="cuda", dtype=torch.bfloat16)
        q.requires_grad_()
        flops = 2.0 * batch * length * length * 32 * 128
        forward = seconds_of(lambda q=q: sdpa(q, q, q, is_causal=True))
        out = sdpa(q, q, q, is_causal=True)
        grad = torch.randn_like(out)
        backward = seconds_of(
            lambda out=out, q=q, grad=grad: torch.autograd.grad(out, q, grad, retain_graph=True)
        )
        for way, measured, factor in (("forward", forward, 1.0), ("backward", backward, 2.5)):
            kernel = Attention("attention", factor * flops, 0.0, way == "backward", 128, length)
            predicted = attention_seconds(kernel, DEVICE)
            print(
                f"{batch:6d} {length:7d} {way:>9s} {1e6 * measured:12.1f} {1e6 * predicted:13.1f}"
            )


if __name__ == "__main__":
    main()
