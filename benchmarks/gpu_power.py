"""Watts, clock and rate of a GPU: idle, copying, in attention and in products with fewer nonzeros.

    python benchmarks/gpu_power.py

How fast a GPU is whose power limit is lower: its clock falls until it takes no more. Each load runs
for some seconds; printed are medians of the second half, by nvidia-smi ten times a second. The GPU
is the first that nvidia-smi lists.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

READ = "power.draw.instant,clocks.sm"
QUERY = f"nvidia-smi -i 0 --query-gpu={READ} --format=csv,noheader,nounits -lms 100"
SIZE, SECONDS = 8192, 4.0
FLOPS = 2.0 * SIZE**3
Sample = tuple[float, float, float]  # time, watts, MHz


def main() -> None:
    """Measure and print."""
    samples: list[Sample] = []
    reader = subprocess.Popen(QUERY.split(), stdout=subprocess.PIPE, text=True)
    threading.Thread(target=_read, args=(reader, samples), daemon=True).start()
    torch.zeros(1, device="cuda")
    time.sleep(SECONDS)
    _tell("idle", samples, time.time() - SECONDS / 2)
    data = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    other, out = torch.randn_like(data), torch.empty_like(data)
    for share in (1.0, 0.5, 0.25, 0.1, 0.0):
        a, b = (one * (torch.rand_like(one) < share) for one in (data, other))
        _load(f"bf16, {share} nonzero", lambda a=a, b=b: torch.mm(a, b, out=out), FLOPS, samples)
    one, low = torch.ones((), device="cuda"), torch.float8_e4m3fn
    a, b = data.to(low), other.to(low).t()

    def product() -> torch.Tensor:
        return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)

    _load("fp8", product, FLOPS, samples)
    _attention(samples)
    source = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    _load("copy, bytes", lambda: target.copy_(source), 2.0**31, samples)
    reader.terminate()


def _attention(samples: list[Sample]) -> None:
    """Causal attention of 4 sequences of 8,192 tokens with 32 heads of 128, as torch chooses it."""
    shape = 4, 32, 8192, 128
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    forward = 4 * 4 * 32 * 8192**2 * 128 / 2  # two products, half of each

    def attended() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.no_grad():
        _load("attention", attended, forward, samples)
    result = attended()
    given = torch.randn_like(result)
    _load(
        "attention backward",
        lambda: torch.autograd.grad(result, (q, k, v), given, retain_graph=True),
        2.5 * forward,
        samples,
    )


def _read(reader: subprocess.Popen[str], samples: list[Sample]) -> None:
    assert reader.stdout is not None
    for line in reader.stdout:
        watts, clock = (float(part) for part in line.split(","))
        samples.append((time.time(), watts, clock))


def _load(name: str, call: Callable[[], object], work: float, samples: list[Sample]) -> None:
    """Run for SECONDS, and print the second half; `work`: FLOPs or bytes of a call."""
    began, half, calls = time.time(), 0.0, 0
    while time.time() < began + SECONDS:
        if not half and time.time() > began + SECONDS / 2:
            half, calls = time.time(), 0
        for _ in range(20):
            call()
        torch.cuda.synchronize()
        calls += 20
    _tell(name, samples, half, f"{work * calls / (time.time() - half) / 1e12:.0f} T/s")


def _tell(name: str, samples: list[Sample], since: float, rate: str = "") -> None:
    some = [sample for sample in samples if sample[0] >= since]
    watts, clock = median(one[1] for one in some), median(one[2] for one in some)
    print(f"{name:20s} {watts:4.0f} W {clock:5.0f} MHz  {rate}", flush=True)


if __name__ == "__main__":
    main()
