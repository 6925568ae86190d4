"""Whether products as wide as those of 70B run at the rate that those of 8B tell.

    python -m benchmarks.wide_products [CLUSTER.yaml]

Llama 3 70B's adapters on two H200s take 10% longer than promised, most of it in products. This runs
each product of a linear layer by itself until the clock has settled, and prints its rate beside the
price's, with the clock and power meanwhile. `bigplan profile` times products of 8B and 13B between
rounds of a fixed load.
"""

from __future__ import annotations

import sys
import time

import torch

from bigplan.cost.compute import Device, gemm_seconds
from bigplan.profile.bench import Bench
from bigplan.profile.gemm import products
from bigplan.profile.load import Load, tokens_of_round
from bigplan.profile.sensors import watching
from bigplan.spec.catalog import find_cluster

DEVICE = torch.device("cuda")
HEATED, MEASURED = 8.0, 1.0  # seconds
# Outputs and inputs of linear layers: 8B's, 70B's, squares.
LAYERS = (
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (8192, 8192),
    (10240, 8192),
    (28672, 8192),
    (8192, 28672),
    (57344, 8192),
    (16384, 16384),
)
TOKENS = (4096, 16384)


def main() -> None:
    """Every product, on tokens of one sequence and of four."""
    gpu = find_cluster(sys.argv[1] if len(sys.argv) > 1 else "h200-1x").group.gpu
    device, bench = Device(gpu, "bf16"), Bench((DEVICE,), 1, 1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    load = Load(DEVICE, torch.bfloat16, tokens_of_round(gpu.peak("bf16")))
    load.heat(HEATED, time.perf_counter)
    for tokens in TOKENS:
        for n, k in LAYERS:
            shapes = (tokens, k), (n, k), (tokens, n)
            x, w, g = (torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes)
            for way, gemm, work in products(x, w, g):
                bench.median(work, MEASURED)
                with watching(DEVICE, 0.05) as watch:
                    seconds = bench.median(work, MEASURED)
                priced = gemm_seconds(gemm, device)
                rates = (f"{gemm.flops / took / 1e12:4.0f}" for took in (seconds, priced))
                told = " TFLOP/s, priced ".join(rates)
                shape = f"{gemm.m:6.0f} x {gemm.inner:6.0f} x {gemm.n:6.0f}"
                print(f"{shape} {way:9s} {told}, x {seconds / priced:.3f}, {watch}", flush=True)


if __name__ == "__main__":
    main()
