"""Sums over gradients in host memory, by all cores that take part.

torch adds in as many equal parts as it has threads, and beside copies some threads are late
(runtime/cpu/cores.py). It squares 16-bit values by way of fp32 values in memory. Compiled sums run
at the rate of host memory: in two thirds of torch's time, and an eighth for squares of 16-bit
gradients.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bigplan.mechanics import SUMMED_ELEMENTS
from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.cpu.native import native


def add(total: Tensor, part: Tensor, cores: Cores) -> None:
    """Add `part` to `total`, both [n] of one dtype on the CPU."""
    library = native()
    if library and library.takes(total):
        library.add(total, part, cores.count)
        return
    sums, others = (torch.split(tensor, SUMMED_ELEMENTS) for tensor in (total, part))

    def add_one(number: int) -> None:
        sums[number].add_(others[number])

    cores.run(partial(add_one, number) for number in range(len(sums)))


def square_sum(values: Tensor, cores: Cores) -> float:
    """The square sum of values [n] on the CPU: squares in fp32, blocks of them summed in fp64.

    It does not depend on the number of cores.
    """
    library = native()
    if library and library.takes(values):
        return library.square_sum(values, cores.count)
    parts = torch.split(values, SUMMED_ELEMENTS)
    norms = torch.empty(len(parts))

    def measure(number: int) -> None:
        torch.linalg.vector_norm(parts[number], dtype=torch.float32, out=norms[number])

    cores.run(partial(measure, number) for number in range(len(parts)))
    return float(norms.double().square().sum())
