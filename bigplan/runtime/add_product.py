"""A matrix product that is added to an fp32 sum.

On CUDA this is torch.addmm with `out_dtype`, which takes 16-bit factors for an fp32 result, and an
fp32 `self` since torch 2.10 (github.com/pytorch/pytorch/pull/167931). Where `self` and `out` are
one tensor it copies nothing and calls cuBLAS with that tensor as C: addmm_out_cuda_impl in
aten/src/ATen/native/cuda/Blas.cpp. The CPU has no such product and adds one computed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(total: Tensor, gradient: Tensor, x: Tensor, *, fresh: bool) -> None:
    """Add gradient^T x to `total`, fp32 [out, in], or overwrite it where it is fresh.

    gradient [tokens, out] and x [tokens, in] are of one dtype; terms are added in fp32. A sum in 16
    bits, which adapters may have, is added to in 16 bits.
    """
    in_fp32 = total.dtype == torch.float32
    if total.is_cuda and in_fp32:
        torch.addmm(
            total, gradient.T, x, out_dtype=torch.float32, beta=0 if fresh else 1, out=total
        )
        return
    product = gradient.T.float() @ x.float() if in_fp32 else gradient.T @ x
    if fresh:
        total.copy_(product)
    else:
        total.add_(product)
