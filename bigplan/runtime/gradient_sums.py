"""Sums over gradients in host memory, by all cores that take part.

torch adds in as many equal parts as it has threads, of which some are late beside copies
(runtime/cores.py), and squares 16-bit values through fp32 ones in memory. Of 8B with 16-bit
gradients on 16 GiB the sums took 3.65 of 9.3 s where host memory alone would take 2.3, and their
squares 0.8 instead of 0.1 (benchmarks/LOG.md).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bigplan.mechanics import SUMMED_ELEMENTS
from bigplan.runtime.cores import Cores
from bigplan.runtime.native import native


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
    """Of values [n] on the CPU: squared in fp32, summed in blocks, and these in fp64.

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
