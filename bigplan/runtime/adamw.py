"""AdamW on pieces of parameters, bit by bit the same however the pieces were cut.

torch's fused kernel does one pass over parameter, gradient and both moments: 28 bytes of memory
traffic an element, as fast as DeepSpeed's CPU kernel with nothing to compile. Two of its habits
would make results depend on the plan, so they are worked around here:

1. On the CPU its vector body and its scalar tail round differently (other fused multiply-adds):
   the last `numel % 16` elements of a tensor get other bits than the same elements inside a
   longer one. Threads split at multiples of 16 elements (a cache line), so only the tail
   matters: it is computed in a buffer padded to `VECTOR`, through the vector body.
2. Its `grad_scale` divides by a tensor and writes the gradient back. Here the gradient is
   multiplied into a small buffer, as torch.nn.utils.clip_grad_norm_ multiplies, one chunk at a
   time: the chunk stays in cache, so memory traffic does not grow, and the gradient is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from bigplan.spec.training import Optimizer

# Elements in the widest vector (AVX-512, one cache line) of the fused CPU kernel.
VECTOR = 16

# Elements of a gradient that are scaled or cast at once. Seen on an H200 machine (16 threads, 200 M
# parameters), G/s with scaled fp32 gradients: CPU 2.9 / 3.4 / 3.5 / 3.1 for 2^20 / 22 / 23 / 24
# (4.2 unscaled, 4.0 with the kernel's grad_scale); CUDA 18 / 66 / 99 for 2^20 / 22 / 24 (120).
# 2^22 is 16 MiB, within the last level cache of a desktop.
CPU_CHUNK = 2**22
CUDA_CHUNK = 2**24


class _Piece(NamedTuple):
    """Tensors of equal length, 1-D: fp32 all, except that the gradient may be bf16."""

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def scratch_bytes(device_type: str) -> int:
    """The most memory that one `adamw_step` takes beside its arguments and a few KiB."""
    return 4 * (CPU_CHUNK if device_type == "cpu" else CUDA_CHUNK)


def adamw_step(  # noqa: PLR0913, PLR0917 - four parallel lists, as in torch's functional optimizers
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: int,
    settings: Optimizer,
    gradient_scale: float = 1.0,
) -> None:
    """Update parameters and moments in place: step number `step` (the first is 1).

    `settings.learning_rate` is this step's; `settings.weight_decay` is decoupled and holds for
    every tensor given (call again for those without). The lists run in parallel; tensors are
    contiguous, on one device, fp32, the gradients fp32 or bf16. Gradients are multiplied by
    `gradient_scale` (the clip factor) in fp32 and are not changed. Every element's result
    depends only on its own values, `step`, `settings` and `gradient_scale`, not on the shape it
    comes in.
    """
    assert step >= 1, step
    lists = (parameters, gradients, exp_avgs, exp_avg_sqs)
    flat = [[_flat(tensor) for tensor in tensors] for tensors in lists]
    whole: list[_Piece] = []
    for group in zip(*flat, strict=True):
        piece = _Piece(*group)
        body, tail = _split(piece)
        if tail is not None:
            _tail_step(tail, step, settings, gradient_scale)
        if body is None:
            continue
        if gradient_scale == 1.0 and piece.gradient.dtype == torch.float32:
            whole.append(body)
        else:
            _chunked_step(body, step, settings, gradient_scale)
    _fused(whole, step, settings)


def _flat(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.detach().view(-1)


def _split(piece: _Piece) -> tuple[_Piece | None, _Piece | None]:
    """The part that the kernel's vector body handles, and the rest.

    CUDA's kernel rounds the same way in both, so there everything is body.
    """
    count = piece.parameter.numel()
    cut = count if piece.parameter.is_cuda else count - count % VECTOR
    body = _slice(piece, 0, cut) if cut > 0 else None
    tail = _slice(piece, cut, count) if cut < count else None
    return body, tail


def _slice(piece: _Piece, start: int, stop: int) -> _Piece:
    return _Piece(*(tensor[start:stop] for tensor in piece))


def _tail_step(tail: _Piece, step: int, settings: Optimizer, scale: float) -> None:
    """Fewer than VECTOR elements, through the vector body, by a padded copy."""
    count = tail.parameter.numel()
    padded = _Piece(*torch.zeros(4, VECTOR, device=tail.parameter.device).unbind())
    for buffer, tensor in zip(padded, tail, strict=True):
        buffer[:count].copy_(tensor)
    if scale != 1.0:
        padded.gradient.mul_(scale)
    _fused([padded], step, settings)
    for name in ("parameter", "exp_avg", "exp_avg_sq"):
        getattr(tail, name).copy_(getattr(padded, name)[:count])


def _chunked_step(piece: _Piece, step: int, settings: Optimizer, scale: float) -> None:
    """The same update with the gradient scaled in fp32, a cache-sized chunk at a time."""
    device = piece.parameter.device
    chunk = CPU_CHUNK if device.type == "cpu" else CUDA_CHUNK
    count = piece.parameter.numel()
    scratch = torch.empty(min(chunk, count), dtype=torch.float32, device=device)
    for part in _chunks(piece, chunk):
        gradient = scratch[: part.parameter.numel()]
        if part.gradient.dtype == torch.float32:
            torch.mul(part.gradient, scale, out=gradient)
        else:
            gradient.copy_(part.gradient)
            if scale != 1.0:
                gradient.mul_(scale)
        _fused([part._replace(gradient=gradient)], step, settings)


def _chunks(piece: _Piece, chunk: int) -> Iterator[_Piece]:
    count = piece.parameter.numel()
    for start in range(0, count, chunk):
        yield _slice(piece, start, min(start + chunk, count))


def _fused(pieces: list[_Piece], step: int, settings: Optimizer) -> None:
    if not pieces:
        return
    device = pieces[0].parameter.device
    adamw(
        [piece.parameter for piece in pieces],
        [piece.gradient for piece in pieces],
        [piece.exp_avg for piece in pieces],
        [piece.exp_avg_sq for piece in pieces],
        [],
        # torch adds one before it uses them; fp32 counts exactly to 16.7 M steps
        [torch.full((), float(step - 1), device=device) for _ in pieces],
        fused=True,
        amsgrad=False,
        beta1=settings.beta1,
        beta2=settings.beta2,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        eps=settings.epsilon,
        maximize=False,
    )
