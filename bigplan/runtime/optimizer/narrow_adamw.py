"""AdamW whose moments are stored in bf16 or 8 bits: by compiled code, a kernel, or plain torch.

Elements that are stored together are updated in one call, as a block's scale is of all of them.
Tensors with other weight decay or learning rate are runs of these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bigplan.mechanics import NICE
from bigplan.runtime.cpu.native import TYPES, Native, Team
from bigplan.runtime.memory.moments import (
    decoded,
    drawn,
    nearest_first,
    of_elements,
    rounded_bf16,
    rounded_second,
)
from bigplan.spec.moments import BLOCK, FIRST_BITS, SECOND_BITS, levels

WINDOW = 1024 * BLOCK  # elements that plain torch updates at a time


class Run(NamedTuple):
    """Elements from `start` on, up to the next run, with constants in adamw.py's order."""

    start: int
    constants: tuple[float, ...]


class NarrowPiece(NamedTuple):
    """1-D tensors of elements that are stored together, all on one device."""

    parameter: Tensor  # fp32
    gradient: Tensor
    moments: tuple[Tensor, ...]  # bf16, or codes
    scales: tuple[Tensor, ...] = ()
    copy: Tensor | None = None  # the parameter in 16 bits, written anew

    def part(self, start: int, stop: int) -> NarrowPiece:
        """Some of its elements, from the first of a block on."""
        assert start % BLOCK == 0, start
        return NarrowPiece(
            self.parameter[start:stop],
            self.gradient[start:stop],
            tuple(moment[start:stop] for moment in self.moments),
            tuple(each[start // BLOCK : -(-stop // BLOCK)] for each in self.scales),
            None if self.copy is None else self.copy[start:stop],
        )


def step_on_cpu(
    library: Native | None,
    piece: NarrowPiece,
    runs: Sequence[Run],
    by: tuple[float, int],
    threads: int = 1,
) -> None:
    """Update in place and write the copy; `by`: what divides gradients, and the step's number."""
    if library and library.takes(piece.gradient, piece.copy):
        _compiled(library, piece, runs, by, threads)
    else:
        reference(piece, runs, by)


def reference(piece: NarrowPiece, runs: Sequence[Run], by: tuple[float, int]) -> None:
    """The same in plain torch, on any device; it needs a few copies of WINDOW elements."""
    count = piece.parameter.numel()
    ends = [*(run.start for run in runs[1:]), count]
    for start in range(0, count, WINDOW):
        part = piece.part(start, min(start + WINDOW, count))
        decay, rate = torch.empty_like(part.parameter), torch.empty_like(part.parameter)
        for run, end in zip(runs, ends, strict=True):
            mine = slice(max(run.start - start, 0), max(end - start, 0))
            decay[mine], rate[mine] = run.constants[0], run.constants[-1]
        _window(part, (decay, rate), runs[0].constants, by)


def _window(
    piece: NarrowPiece,
    own: tuple[Tensor, Tensor],
    constants: tuple[float, ...],
    by: tuple[float, int],
) -> None:
    """`own`: each element's decay and rate, the first and last of the constants."""
    (divisor, step), (decay, rate) = by, own
    _, first_weight, second_decay, second_weight, root, epsilon, _ = constants
    parameter, (first, second) = piece.parameter, piece.moments
    gradient = piece.gradient.float() / divisor
    words = drawn(parameter, gradient, step)
    coded = bool(piece.scales)
    if coded:
        each = [of_elements(scales, len(parameter)) for scales in piece.scales]
        old, old_root = decoded(first, each[0]), decoded(second, each[1])
        square = old_root * old_root
    else:
        old, square = first.float(), second.float()
    new = old + first_weight * (gradient - old)
    new_square = second_decay * square + second_weight * gradient * gradient
    new_root = new_square.sqrt()
    parameter.copy_(parameter * decay + rate * new / (new_root / root + epsilon))
    if piece.copy is not None:
        piece.copy.copy_(parameter)
    if coded:
        found = (nearest_first(new), rounded_second(new_root, (words >> 8) * 2.0**-24))
        for (codes, scales), code, scale in zip(found, piece.moments, piece.scales, strict=True):
            code.copy_(codes)
            scale.copy_(scales)
    else:
        first.copy_(new)
        second.copy_(rounded_bf16(new_square, words))


class _Run(ctypes.Structure):
    """As runtime/cpu/moments.cpp has it."""

    _fields_ = (("start", ctypes.c_int64), ("decay", ctypes.c_float), ("rate", ctypes.c_float))


class _Part(ctypes.Structure):
    """As runtime/cpu/moments.cpp has it."""

    _fields_ = (
        ("start", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("parameter", ctypes.c_void_p),
        ("moments", ctypes.c_void_p * 2),
        ("scales", ctypes.c_void_p * 2),
        ("gradient", ctypes.c_void_p),
        ("copy", ctypes.c_void_p),
        ("runs", ctypes.POINTER(_Run)),
        ("run_count", ctypes.c_int64),
        ("gradient_type", ctypes.c_int32),
        ("copy_type", ctypes.c_int32),
        ("divisor", ctypes.c_float),
    )


class _Constants(ctypes.Structure):
    """As runtime/cpu/moments.cpp has it."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("first_weight", "second_decay", "second_weight")),
        *((name, ctypes.c_float) for name in ("root", "epsilon")),
        ("step", ctypes.c_uint32),
        ("first_levels", ctypes.c_float * 256),
        ("second_levels", ctypes.c_float * 256),
    )


_MAGNITUDES = levels(FIRST_BITS)
# By the bits of a code, which has two's complement; -128 is none.
_Table = ctypes.c_float * 256
_FIRST = _Table(*_MAGNITUDES, 0.0, *(-value for value in reversed(_MAGNITUDES[1:])))
_SECOND = _Table(*levels(SECOND_BITS))


def _compiled(
    library: Native, piece: NarrowPiece, runs: Sequence[Run], by: tuple[float, int], threads: int
) -> None:
    (divisor, step), gradient = by, piece.gradient
    _, *shared, _ = runs[0].constants
    each = [_Run(run.start, run.constants[0], run.constants[-1]) for run in runs]
    table = (_Run * len(runs))(*each)
    part = _Part(
        count=piece.parameter.numel(),
        parameter=piece.parameter.data_ptr(),
        moments=(ctypes.c_void_p * 2)(*(moment.data_ptr() for moment in piece.moments)),
        scales=(ctypes.c_void_p * 2)(*(each.data_ptr() for each in piece.scales)),
        gradient=gradient.data_ptr(),
        copy=None if piece.copy is None else piece.copy.data_ptr(),
        runs=table,
        run_count=len(runs),
        gradient_type=TYPES[gradient.dtype],
        copy_type=0 if piece.copy is None else TYPES[piece.copy.dtype],
        divisor=divisor,
    )
    constants = _Constants(*shared, step, _FIRST, _SECOND)
    function = "adamw_int8" if piece.scales else "adamw_bf16"
    library.call(function, part, constants, Team(threads, NICE))
