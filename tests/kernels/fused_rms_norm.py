"""F.rms_norm as GPUs have it, where there is none.

On a CUDA GPU autograd records `_fused_rms_norm` and its backward. On a CPU torch takes both apart
into a chain of other operators. These two have the same names and arguments, and shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

_library: Any = torch.library.Library
LIBRARY: Any = _library("bigplan_as_on_a_gpu", "DEF")
LIBRARY.define(
    "_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps)"
    " -> (Tensor, Tensor)"
)
LIBRARY.define(
    "_fused_rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape,"
    " Tensor rstd, Tensor? weight, bool[2] output_mask) -> (Tensor, Tensor)"
)
OPERATORS: Any = torch.ops.bigplan_as_on_a_gpu


def _ahead(x: Tensor, shape: Any, weight: Any, epsilon: Any) -> tuple[Tensor, Tensor]:
    rows = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), rows


def _back(
    d: Tensor, x: Tensor, shape: Any, rstd: Any, weight: Any, mask: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.shape, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _gradients(ctx: Any, d: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    mask = [True, True]
    by_x, by_weight = OPERATORS._fused_rms_norm_backward(d, x, ctx.shape, rstd, weight, mask)
    return by_x, None, by_weight, None


LIBRARY.impl("_fused_rms_norm", _ahead, "Meta")
LIBRARY.impl("_fused_rms_norm_backward", _back, "Meta")
torch.library.register_autograd(
    "bigplan_as_on_a_gpu::_fused_rms_norm", _gradients, setup_context=_save, lib=LIBRARY
)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = OPERATORS._fused_rms_norm(x, list(shape), weight, eps)[0]
    return out


@contextmanager
def fused_rms_norm() -> Iterator[None]:
    """F.rms_norm is recorded as one operator, for planning on fake tensors."""
    if torch.cuda.is_available():
        yield
        return
    with patch.object(F, "rms_norm", _rms_norm):
        yield
