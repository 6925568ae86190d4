"""Rate of the CPU's optimizer update, in G parameters/s, for every kind of gradient.

    python benchmarks/cpu_adamw.py [--millions 200] [--threads 1,2,4,8,16] [--repeats 5] [--torch]

Every row is the best of the repeats, on tensors made once. `plain` is torch's fused kernel alone;
the others are what the runtime does, by its compiled kernel or, with --torch, by torch's: gradients
divided by loss scale and clip factor, 16-bit gradients widened, and the new parameters rounded to
bf16, which follows every update in mixed precision. `multiplied` is what the runtime did before:
the clip factor multiplied into a buffer. 28 bytes of memory traffic a parameter for AdamW.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch

from bigplan.runtime import fused
from bigplan.runtime.adamw import adamw_kernel
from bigplan.runtime.cores import Cores
from bigplan.runtime.fused import Kernel, fused_step
from bigplan.runtime.native import Piece
from bigplan.runtime.sgd import sgd_kernel
from bigplan.spec.optimizer import Optimizer

ADAMW = adamw_kernel(Optimizer(), 100, 1e-4, 0.1)
SGD = sgd_kernel(Optimizer(name="sgd"), 1e-4, 0.0)
DIVISOR = 1.7


class Buffers:
    """Parameter, moments, and gradients of every dtype: 26 bytes a parameter."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.parameter = torch.full((count,), 0.02)
        self.moments = (torch.full((count,), 1e-4), torch.full((count,), 1e-7))
        gradient = torch.full((count,), 1e-3)
        self.gradients = {
            torch.float32: gradient,
            torch.bfloat16: gradient.bfloat16(),
            torch.float16: gradient.half(),
        }
        self.weights = self.parameter.bfloat16()
        self.cores: Cores | None = None

    def piece(self, dtype: torch.dtype, moments: int = 2) -> Piece:
        """Everything, with gradients of that dtype."""
        return Piece(self.parameter, self.gradients[dtype], self.moments[:moments])

    def multiplied(self) -> None:
        """The clip factor multiplied into a buffer that stays in cache."""
        piece, scratch = self.piece(torch.float32), torch.empty(fused.UPDATED_ELEMENTS)
        for start in range(0, self.count, fused.UPDATED_ELEMENTS):
            part = piece.part(start, min(start + fused.UPDATED_ELEMENTS, self.count))
            gradient = torch.mul(part.gradient, 1 / DIVISOR, out=scratch[: part.elements])
            ADAMW.fused([part._replace(gradient=gradient)], None)

    def cast(self, chunk: int | None) -> None:
        """Update and cast to bf16: all at once, or so many elements at a time."""
        piece, size = self.piece(torch.float32), chunk or self.count
        for start in range(0, self.count, size):
            stop = min(start + size, self.count)
            ADAMW.fused([piece.part(start, stop)], None)
            self.weights[start:stop].copy_(self.parameter[start:stop])

    def step(
        self, dtype: torch.dtype, divisor: float, kernel: Kernel = ADAMW, moments: int = 2
    ) -> None:
        """The runtime's update."""
        fused_step([self.piece(dtype, moments)], kernel, divisor, self.cores)

    def copied(self, dtype: torch.dtype) -> None:
        """The same in mixed precision."""
        piece = self.piece(dtype)._replace(copy=self.weights)
        fused_step([piece], ADAMW, DIVISOR, self.cores)

    def small(self) -> None:
        """Tensors of 4096 elements, as norms have."""
        piece = self.piece(torch.bfloat16)
        stops = range(4096, min(self.count, 2**22) + 1, 4096)
        fused_step([piece.part(stop - 4096, stop) for stop in stops], ADAMW, DIVISOR, self.cores)


def variants(buffers: Buffers) -> dict[str, tuple[int, Callable[[], None]]]:
    """By name: parameters updated, and the work."""
    count, single = buffers.count, torch.float32
    work: dict[str, Callable[[], None]] = {
        "plain fused AdamW, fp32 gradients": lambda: ADAMW.fused([buffers.piece(single)], None),
        "fp32 gradients": lambda: buffers.step(single, 1.0),
        "fp32 gradients, divided": lambda: buffers.step(single, DIVISOR),
        "fp32 gradients, multiplied": buffers.multiplied,
        "bf16 gradients": lambda: buffers.step(torch.bfloat16, 1.0),
        "bf16 gradients, divided": lambda: buffers.step(torch.bfloat16, DIVISOR),
        "fp16 gradients, divided": lambda: buffers.step(torch.float16, DIVISOR),
        "fp32 gradients, divided, and bf16 copy": lambda: buffers.copied(single),
        "bf16 gradients, divided, and bf16 copy": lambda: buffers.copied(torch.bfloat16),
        "SGD with momentum, fp32": lambda: buffers.step(single, 1.0, SGD, 1),
        "then cast to bf16": lambda: buffers.cast(None),
        **{
            f"then cast to bf16, 2^{power} at a time": lambda power=power: buffers.cast(2**power)
            for power in (18, 20, 22, 24)
        },
    }
    found = {name: (count, run) for name, run in work.items()}
    smalls = min(count, 2**22) // 4096 * 4096
    return {**found, "tensors of 4096, bf16, divided": (smalls, buffers.small)}


def best_rate(count: int, work: Callable[[], None], repeats: int) -> float:
    """Elements per second of the fastest repeat, after one that is not counted."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return count / min(seconds)


def main() -> None:
    """Print a table: a row per variant, a column per number of threads."""
    cores = len(os.sched_getaffinity(0))
    usual = ",".join(str(n) for n in (1, 2, 4, 8, 16, 32) if n <= cores)
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--millions", type=int, default=200, help="parameters")
    parser.add_argument("--threads", default=usual, help="numbers, joined by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunks", default="22", help="powers of two for 16-bit gradients")
    parser.add_argument("--torch", action="store_true", help="not the compiled kernel")
    options = parser.parse_args()
    if options.torch:
        fused.native = lambda: None
    threads = [int(text) for text in options.threads.split(",")]
    torch.set_num_threads(max(threads))  # who touches memory first decides where it lies
    buffers = Buffers(options.millions * 1_000_000)
    print(f"torch {torch.__version__}, {cores} cores, {options.millions} M parameters, G/s")
    for power in options.chunks.split(","):
        fused.UPDATED_ELEMENTS = 2 ** int(power)
        print(f"\n{f'16-bit gradients 2^{power} at a time; threads':<44}", *map(_cell, threads))
        for name, (count, work) in variants(buffers).items():
            rates = []
            for number in threads:
                torch.set_num_threads(number)
                with Cores() as buffers.cores:
                    rates.append(best_rate(count, work, options.repeats) / 1e9)
            print(f"{name:<44}", *(f"{rate:6.2f}" for rate in rates), flush=True)


def _cell(number: int) -> str:
    return f"{number:>6}"


if __name__ == "__main__":
    main()
