"""Cross-entropy of logits: the loss in one pass, the gradient in place of the logits in another.

Plain torch copies the logits to fp32 and keeps log-probabilities beside them: it moves some 30
bytes a logit in bf16. Here it is 6 bytes, and no additional memory. Arithmetic is fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns at a time: a row of 128,256 takes 32 turns
WARPS = 8
LEAST = tl.constexpr(-1e30)  # below every logit; -inf minus itself would be no number


def reference(logits: Tensor, targets: Tensor) -> Tensor:
    """Losses of every row in plain torch; 0 where the target is negative.

    A target beyond the columns is in another rank's logits, so the loss lacks the target's logit.
    """
    columns = logits.shape[1]
    picked = logits.gather(1, targets.clamp(0, columns - 1)[:, None])[:, 0]
    picked = torch.where(targets < columns, picked, 0.0)
    return torch.where(targets < 0, 0.0, logits.logsumexp(1) - picked)


@triton.jit
def _forward(logits, targets, losses, lse, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    offsets = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), LEAST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        value = tl.load(start + first + offsets, mask=inside, other=LEAST).to(tl.float32)
        new = tl.maximum(largest, value)
        total = total * tl.exp(largest - new) + tl.where(inside, tl.exp(value - new), 0.0)
        largest = new
    top = tl.max(largest, 0)
    total *= tl.exp(largest - top)
    result = top + tl.log(tl.sum(total, 0))
    target = tl.load(targets + row)
    here = (target >= 0) & (target < columns)
    picked = tl.load(start + target, mask=here, other=0.0).to(tl.float32)
    tl.store(lse + row, result)
    tl.store(losses + row, tl.where(target < 0, 0.0, result - picked))


@triton.jit
def _backward(logits, targets, lse, gradient, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    offsets = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    scale = tl.where(target < 0, 0.0, tl.load(gradient + row))
    level = tl.load(lse + row)
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        value = tl.load(start + first + offsets, mask=inside, other=0.0).to(tl.float32)
        probability = tl.exp(value - level)
        probability = tl.where(first + offsets == target, probability - 1.0, probability)
        tl.store(start + first + offsets, (probability * scale).to(logits.dtype.element_ty), inside)


def forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and logsumexp of every row of contiguous logits [n, V], fp32 [n]; targets int64 [n].

    The loss is 0 where the target is negative, and the logsumexp where it is beyond V.
    """
    assert logits.is_contiguous()
    rows, columns = logits.shape
    losses, lse = torch.empty(2, rows, dtype=torch.float32, device=logits.device).unbind()
    _forward[(rows,)](logits, targets, losses, lse, columns, BLOCK=BLOCK, num_warps=WARPS)
    return losses, lse


def backward_(logits: Tensor, targets: Tensor, lse: Tensor, gradient: Tensor) -> Tensor:
    """Overwrites the logits with the gradient by them; `gradient` [n] is by the losses, fp32."""
    rows, columns = logits.shape
    _backward[(rows,)](
        logits, targets, lse, gradient.contiguous(), columns, BLOCK=BLOCK, num_warps=WARPS
    )
    return logits
