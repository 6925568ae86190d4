"""What a GPU limited by power makes of products, by library and by the numbers in them.

Usage: h200_power.py [SECONDS]. A block's products (llama-like-5.5b, 32,768 tokens) run in turn as
in training, forward, by input and by weight, so many seconds (5) each way: TFLOP/s, clock and
watts. Ways: torch's default library, cuBLASLt, products that share an input as one, a larger cuBLAS
workspace (set by the environment before the first product, so in a process of its own), and tensors
of zeros.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
from torch import Tensor

TOKENS, HIDDEN, FFN = 32768, 4096, 14336
APART = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096))
TOGETHER = ((6144, 4096), (4096, 4096), (28672, 4096))
DOWN = ((4096, 14336),)
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0


def layer(shapes: tuple[tuple[int, int], ...], zeros: bool) -> list[tuple[Tensor, ...]]:
    """Input, weight, gradient by the output and fp32 sum of every product."""

    def some(*shape: int) -> Tensor:
        made = torch.zeros if zeros else torch.randn
        return made(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

    inputs = {k: some(TOKENS, k) for _, k in shapes}
    outputs = {n: some(TOKENS, n) for n, _ in shapes}
    sums = [torch.zeros(n, k, device="cuda") for n, k in shapes]
    return [(inputs[k], some(n, k), outputs[n], s) for (n, k), s in zip(shapes, sums, strict=True)]


def once(products: list[tuple[Tensor, ...]]) -> None:
    """All three products of each."""
    for x, w, g, total in products:
        torch.nn.functional.linear(x, w)
        g @ w
        torch.addmm(total, g.T, x, out_dtype=torch.float32, out=total)


def sensors() -> tuple[float, float]:
    """MHz and watts."""
    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    mhz, watts = told.strip().split(", ")
    return float(mhz), float(watts)


def measure(name: str, shapes: tuple[tuple[int, int], ...], *, zeros: bool = False) -> None:
    """Print a way's rate once the clock has settled."""
    products = layer(shapes, zeros)
    flops = sum(6.0 * TOKENS * n * k for n, k in shapes)
    seen, rounds = [], 0
    begin = start = time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        once(products)
        rounds += 1
        if rounds % 8 == 0:
            torch.cuda.synchronize()
            if time.perf_counter() - begin < 0.3 * SECONDS:
                start, rounds, seen = time.perf_counter(), 0, []
            else:
                seen.append(sensors())
    torch.cuda.synchronize()
    rate = rounds * flops / (time.perf_counter() - start)
    mhz, watts = (sum(v) / len(v) for v in zip(*seen, strict=True))
    print(f"{name:34s} {rate / 1e12:6.1f} TFLOP/s {mhz:6.0f} MHz {watts:6.1f} W", flush=True)
    del products
    torch.cuda.empty_cache()


def main() -> None:
    """All ways."""
    tag = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    measure("(warm)", APART + DOWN)
    for _ in range(2):
        measure(f"apart {tag}", APART + DOWN)
        measure(f"together {tag}", TOGETHER + DOWN)
        torch.backends.cuda.preferred_blas_library("cublaslt")
        measure(f"apart, cublaslt {tag}", APART + DOWN)
        measure(f"together, cublaslt {tag}", TOGETHER + DOWN)
        torch.backends.cuda.preferred_blas_library("cublas")
    if not tag:
        measure("zeros", APART + DOWN, zeros=True)
        env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":65536:8"}
        subprocess.run([sys.executable, *sys.argv], env=env, check=True)


if __name__ == "__main__":
    main()
