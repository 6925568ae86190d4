"""Sums of gradients in host memory, and of their squares: by torch and compiled, by threads.

    python -m benchmarks.cpu_sums [--millions 218.112] [--layers 4] [--threads 8,12,16]

The defaults are layers of llama-3-8b. Each layer's sum takes a part in turn; prints the median over
all of them in GB/s, of 3 tensors for a sum and 1 for squares, alone and, with a GPU, beside copies
both ways. torch's squares are taken 2^22 elements a core, its sums by its own threads, and the
first line of each dtype is what `bigplan profile` calls host memory: c = a + b, by torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from statistics import median
from time import perf_counter
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cpu_update import beside, copies
from bigplan.runtime.cpu import gradient_sums
from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.memory.slab import Slab, typed

DTYPES = (torch.float32, torch.bfloat16)
ROUNDS = 2  # the first one left out
Work = Callable[[Tensor, Tensor], object]


def rate(layers: Sequence[tuple[Tensor, Tensor]], tensors: int, work: Work) -> float:
    """GB/s of so many tensors a layer."""
    found = []
    for _ in range(ROUNDS):
        found.clear()
        for total, part in layers:
            start = perf_counter()
            work(total, part)
            found.append(perf_counter() - start)
    return 1e-9 * tensors * layers[0][0].nbytes / median(found)


def show(layers: Sequence[tuple[Tensor, Tensor]], threads: Sequence[int], where: str) -> None:
    """All ways of both."""
    third = torch.empty_like(layers[0][0])
    ways: dict[str, tuple[int, Callable[[Cores], Work]]] = {
        "c = a + b, torch": (3, lambda cores: lambda a, b: torch.add(a, b, out=third)),
        "sum, torch": (3, lambda cores: lambda total, part: total.add_(part)),
        "squares, torch": (1, lambda cores: lambda total, part: by_torch(total, cores)),
        "sum, compiled": (
            3,
            lambda cores: lambda total, part: gradient_sums.add(total, part, cores),
        ),
        "squares, compiled": (
            1,
            lambda cores: lambda total, part: gradient_sums.square_sum(total, cores),
        ),
    }
    usual = torch.get_num_threads()
    for name, (tensors, made) in ways.items():
        told = []
        for number in threads:
            torch.set_num_threads(number)
            with Cores(Fraction(1)) as cores:
                told.append(f"{number} {rate(layers, tensors, made(cores)):.1f}")
        torch.set_num_threads(usual)
        print(f"{layers[0][0].dtype}, {where}, {name}, GB/s by threads: {', '.join(told)}")


def by_torch(values: Tensor, cores: Cores) -> float:
    """As without a compiler."""
    with mock.patch.object(gradient_sums, "native", return_value=None):
        return gradient_sums.square_sum(values, cores)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--millions", type=float, default=218.112, help="elements a layer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=lambda text: [int(n) for n in text.split(",")])
    options = parser.parse_args()
    cores, cuda = len(os.sched_getaffinity(0)), torch.cuda.is_available()
    threads = options.threads or sorted({max(1, cores // 2), max(1, cores * 3 // 4), cores})
    count = int(options.millions * 1e6) // 64 * 64
    print(f"torch {torch.__version__}, {cores} cores, {options.layers} layers of {count}")
    for dtype in DTYPES:
        slab = Slab(2 * options.layers * count * dtype.itemsize, pinned=cuda)
        whole = slab.take(2 * options.layers * count * dtype.itemsize)
        sums, parts = typed(whole, dtype, (2, options.layers, count)).fill_(1e-3).unbind()
        layers = list(zip(sums.unbind(), parts.unbind(), strict=True))
        show(layers, threads, "alone")
        if cuda:
            with beside([copies]):
                show(layers, threads, "beside copies")
        del whole, sums, parts, layers
        slab.close()


if __name__ == "__main__":
    main()
