"""Constants in fp32 as numbers in bf16 that add up to them (Parameter.constant).

A layer's tensors are of one dtype, and a router's bias in 16 bits would choose other experts. Each
of three terms has eight bits of a number's 24, so the sum is exact in bf16. In fp16 it is for
numbers below 2^15, but for what is smaller than 2^-24.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bigplan.spec.step import TERMS


def terms_of(values: Tensor) -> Tensor:
    """Terms [3, n] of values [n], fp32, each one that bf16 holds."""
    found, rest = [], values.float()
    for _ in range(TERMS):
        term = rest.bfloat16().float()
        found.append(term)
        rest = rest - term
    return torch.stack(found)


def values_of(terms: Tensor) -> Tensor:
    """Values [n], fp32, of their terms [3, n] in any dtype."""
    return terms.float().sum(0)
