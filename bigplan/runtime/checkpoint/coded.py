"""Moments in 8 bits out of a checkpoint, whose pieces other ranks or tiers may have had.

Blocks begin with each piece, so those of another plan lie elsewhere: values are decoded and coded
again, to nearest. Where blocks are the same, so are the codes and scales. A checkpoint with moments
in fp32 or bf16 has no roots of second ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bigplan.rectangle import Rectangle, cut
from bigplan.runtime.checkpoint.layout import Span
from bigplan.runtime.manifest import Kind
from bigplan.runtime.memory.moments import nearest_first, nearest_second
from bigplan.runtime.optimizer.narrow_adamw import WINDOW
from bigplan.spec.moments import BLOCK

Read = Callable[[Kind, Rectangle, Tensor], None]  # a rectangle's values, into flat memory


def fill_coded(
    read: Read,
    spans: Sequence[Span],
    codes: Tensor,
    scales: Tensor,
    device: torch.device,
    *,
    rooted: bool = True,
) -> None:
    """Fill a piece's codes and scales; spans are counted from its first element.

    `rooted`: what is read is what is coded, not squares of it. `device` computes codes. Of memory
    it takes some copies of WINDOW elements.
    """
    for start in range(0, len(codes), WINDOW):
        stop = min(start + WINDOW, len(codes))
        values = torch.zeros(stop - start)
        for span in spans:
            low, high = max(span.start, start), min(span.stop, stop)
            if low < high:
                _read(read, span, range(low, high), values[low - start : high - start])
        code = nearest_first if codes.dtype == torch.int8 else nearest_second
        found, each = code(values.to(device) if rooted else values.to(device).sqrt_())
        codes[start:stop].copy_(found)
        scales[start // BLOCK : -(-stop // BLOCK)].copy_(each)


def _read(read: Read, span: Span, elements: range, into: Tensor) -> None:
    """Some of a span's elements."""
    origin, place = span.rectangle, 0
    first, last = elements.start - span.start, elements.stop - span.start
    for part in cut(origin.parameter, origin.columns, first, last):
        moved = part.moved(origin.first_row, origin.first_column)
        read(span.kind, moved, into[place : place + part.elements])
        place += part.elements
