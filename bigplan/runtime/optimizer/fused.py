"""The optimizer on pieces of parameters: the same bits however they are cut.

On the CPU the compiled kernel (runtime/cpu/step.cpp) updates a part in one pass over memory, its
16-bit copy included, and cuts change no bit. Elsewhere, and where nothing could be compiled,
torch's fused kernels do one pass over parameter, gradient and moments. This module avoids what
would make their results depend on the plan, or cost another pass:

1. On the CPU the kernels' vector body and scalar tail round differently (other fused
   multiply-adds): the last `numel % 16` elements of a tensor get other bits than the same elements
   inside a longer one. Threads split at multiples of 16 elements (a cache line), so only the tail
   matters: all tails of a call are computed together, each padded to `VECTOR`.
2. Gradients are divided by `divisor` (loss scale and clip factor) inside the kernel, which writes
   them back. Nobody reads a gradient after its update, and multiplying by the clip factor into a
   buffer, as torch.nn.utils.clip_grad_norm_ would round, cost a sixth of the rate (H200 machine,
   16 threads, fp32: 3.5 G/s against 4.0; 4.2 undivided). A division by a power of two is exact.
3. 16-bit gradients are cast to fp32 in a buffer that stays in cache, so memory traffic does not
   grow; tensors shorter than the buffer share it, so that one call does many.

With either kernel the CPU's cores take parts as they come: in threads of the compiled kernel, or in
those of runtime/cpu/cores.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bigplan.mechanics import UPDATED_ELEMENTS, WIDENED_ELEMENTS
from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.cpu.native import Native, Piece, Step, native

# Elements in the widest vector (AVX-512, one cache line) of the fused CPU kernels.
VECTOR = 16


class Kernel(NamedTuple):
    """An optimizer's update in two forms; on x86 CPUs with AVX2 both give the same bits."""

    native: Step  # of runtime/cpu/step.cpp
    # torch's: updates fp32 pieces in place; divides gradients by the 0-dim tensor first, if any
    fused: Callable[[Sequence[Piece], Tensor | None], None]


def fused_step(
    pieces: Sequence[Piece], kernel: Kernel, divisor: float = 1.0, cores: Cores | None = None
) -> None:
    """Update the pieces in place with `kernel`, on the CPU by all `cores` (None: this thread).

    Gradients are divided by `divisor` in fp32; afterwards their content is undefined. Every
    element's result depends only on its own values, the kernel and `divisor`, not on the piece
    that it is in.
    """
    for piece in pieces:
        _check(piece)
    if not pieces:
        return
    device = pieces[0].parameter.device
    scale = None if divisor == 1.0 else torch.full((), divisor, device=device)
    if device.type == "cpu":
        if library := _library_for(pieces):
            library.step(kernel.native, pieces, divisor, cores.count if cores else 1)
            return
        pieces, tails = _split(pieces)
        if tails:
            _tail_step(tails, kernel, scale)
        batches = _batches(pieces, UPDATED_ELEMENTS)
        jobs = [partial(_update, kernel, scale, batch) for batch in batches]
        (cores.run if cores else _one_by_one)(jobs)
        return
    if whole := [piece for piece in pieces if piece.gradient.dtype == torch.float32]:
        _update(kernel, scale, whole)
    narrow = [piece for piece in pieces if piece.gradient.dtype != torch.float32]
    for batch in _batches(narrow, WIDENED_ELEMENTS):
        _update(kernel, scale, batch)


def _one_by_one(jobs: Sequence[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def _library_for(pieces: Sequence[Piece]) -> Native | None:
    """The compiled kernels, where there are some for the dtypes of all."""
    library = native()
    if library and all(library.takes(piece.gradient, piece.copy) for piece in pieces):
        return library
    return None


def _update(kernel: Kernel, scale: Tensor | None, pieces: list[Piece]) -> None:
    narrow = pieces[0].gradient.dtype != torch.float32
    kernel.fused(_widened(pieces) if narrow else pieces, scale)
    for piece in pieces:
        piece.write_copy()


def _check(piece: Piece) -> None:
    tensors = [piece.parameter, piece.gradient, *piece.state]
    for tensor in [*tensors, *([] if piece.copy is None else [piece.copy])]:
        assert tensor.shape == (piece.elements,), (tensor.shape, piece.elements)
        assert tensor.is_contiguous(), tensor.stride()


def _split(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The parts that a CPU kernel's vector body handles, and the rests."""
    bodies, tails = [], []
    for piece in pieces:
        cut = piece.elements - piece.elements % VECTOR
        bodies += [piece.part(0, cut)] if cut else []
        tails += [piece.part(cut, piece.elements)] if cut < piece.elements else []
    return bodies, tails


def _tail_step(tails: list[Piece], kernel: Kernel, scale: Tensor | None) -> None:
    """Fewer than VECTOR elements each, through the vector body, by padded copies."""
    values = 2 + len(tails[0].state)
    padded = torch.zeros(values, len(tails), VECTOR, device=tails[0].parameter.device)
    for row, tail in enumerate(tails):
        for buffer, tensor in zip(
            padded, (tail.parameter, tail.gradient, *tail.state), strict=True
        ):
            buffer[row, : tail.elements].copy_(tensor)
    parameter, gradient, *state = (buffer.view(-1) for buffer in padded)
    kernel.fused([Piece(parameter, gradient, tuple(state))], scale)
    parameters, _, *states = padded
    for row, tail in enumerate(tails):
        for buffer, tensor in zip(
            (parameters, *states), (tail.parameter, *tail.state), strict=True
        ):
            tensor.copy_(buffer[row, : tail.elements])
        tail.write_copy()


def _batches(pieces: list[Piece], chunk: int) -> Iterator[list[Piece]]:
    """The pieces in parts, in lists of at most `chunk` elements together."""
    batch: list[Piece] = []
    room = chunk
    for piece in pieces:
        start = 0
        while start < piece.elements:
            part = piece.part(start, min(start + room, piece.elements))
            batch.append(part)
            start += part.elements
            room -= part.elements
            if not room:
                yield batch
                batch, room = [], chunk
    if batch:
        yield batch


def _widened(pieces: list[Piece]) -> list[Piece]:
    """The pieces with fp32 copies of their gradients."""
    sizes = [piece.elements for piece in pieces]
    scratch = torch.empty(sum(sizes), dtype=torch.float32, device=pieces[0].parameter.device)
    parts = torch.split(scratch, sizes)
    torch._foreach_copy_(list(parts), [piece.gradient for piece in pieces])
    return [piece._replace(gradient=part) for piece, part in zip(pieces, parts, strict=True)]
