"""A few numbers from the host to the GPU and back, past its queues of copies.

A GPU copies in the order in which it is asked, each way for itself. So a copy of some bytes waits
until what was asked for before is there, be it gigabytes of parameters. A step of GPT-OSS-120B's
adapters on an H200, with a quarter of the model in host memory, waited 93 ms for seven numbers of
its update (benchmarks/results/2026-11-29-h200-whole-adapters), and its first layer some 110 ms for
tokens. Kernels wait for no copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_gpu(values: Sequence[float], device: torch.device) -> Tensor:
    """The values, fp32, on a device: each is an argument of a kernel that writes it."""
    if device.type == "cpu":
        return torch.tensor(values)
    numbers = torch.empty(len(values), device=device)
    for place, value in zip(numbers, values, strict=True):
        place.fill_(value)
    return numbers


def from_host(numbers: Tensor, device: torch.device) -> Tensor:
    """Contiguous numbers of page-locked memory in a GPU's, read by a Triton kernel."""
    from bigplan.kernels.handwritten.small_copy import small_copy

    here = torch.empty(numbers.shape, dtype=numbers.dtype, device=device)
    small_copy(numbers, here)
    return here


def to_host(numbers: Tensor) -> list[int]:
    """Integers [n] of a GPU, which a Triton kernel writes to host memory; the CPU waits for it."""
    from bigplan.kernels.handwritten.small_copy import small_copy

    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    small_copy(numbers.contiguous(), there)
    torch.cuda.current_stream(numbers.device).synchronize()
    return there.tolist()
