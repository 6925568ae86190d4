"""Products of experts in 8-bit floating point, by torch's grouped product of scaled rows.

It takes E4M3 alone and a scale for each row of both factors (ScaledGroupMM.cu, torch 2.11; compute
capability 9). So gradients are in E4M3, too, where dense ones are in E5M2 (linear/eight_bits.py),
and every row has a scale of its own, which finds its largest value anew: a token's row of what
enters or of a gradient, an expert's row or column of a matrix, an expert's column of rows for the
matrices' gradients. A scale for each row leaves E4M3's four bits of exponent to one row's values.
Tensor cores add up more terms in their own registers, of fewer bits than fp32 (`use_fast_accum`):
the kernel without has half of bf16's rate at Qwen3 30B-A3B's shapes on an H200, and the same error,
which is the casts' (benchmarks/results/2026-11-27-h200-experts-fp8).

A token is cast before it is copied to its experts' rows, which moves 2 bytes an element in place of
7. Its scale lies behind it.

For those gradients rows are transposed, and a part of them begins at a multiple of 16 bytes and is
not empty: zeros fill it up. Nothing waits for numbers of rows. On a CPU the same casts are
multiplied in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from bigplan.mechanics import LEAST_LARGEST
from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts.grouped import Factors

VALUES = torch.float8_e4m3fn
HIGHEST = torch.finfo(VALUES).max
PART = 16  # elements at whose multiples an expert's part of transposed rows begins
BEHIND = 16  # bytes behind a row, the first four its scale, so that rows begin at multiples of 16


class Ends(NamedTuple):
    """Where experts' rows end, and where they do in a transpose, int32 [experts] each."""

    rows: Tensor
    turned: Tensor
    long: int  # elements of a row of the transpose

    @classmethod
    def of(cls, ends: Tensor, rows: int) -> Ends:
        """Of so many rows; the transpose has room for any numbers of rows of experts."""
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        turned = (counts + PART - 1).div(PART, rounding_mode="floor").clamp_min(1) * PART
        long = -(-rows // PART) * PART + PART * len(ends)
        return cls(ends, turned.cumsum(0, dtype=torch.int32), long)


class Turned(NamedTuple):
    """Experts' rows [rows, k] transposed, as a factor of matrices' gradients."""

    values: Tensor  # [k, long]
    scales: Tensor  # fp32 [experts * k]
    ends: Ends


class CastsRows(Protocol):
    """As kernels.expert_casts.by_row."""

    def __call__(self, x: Tensor, values: Tensor, scales: Tensor) -> None: ...


class CastsColumns(Protocol):
    """As kernels.expert_casts.by_column."""

    def __call__(
        self, x: Tensor, experts: int, ends: tuple[Tensor, Tensor] | None = None, long: int = 0
    ) -> tuple[Tensor, Tensor]: ...


def by_row(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """As kernels.expert_casts.by_row, in plain torch."""
    largest = x.abs().amax(1).float().clamp_min(LEAST_LARGEST)
    values.copy_((x.float() * (HIGHEST / largest)[:, None]).to(VALUES))
    scales.copy_((largest / HIGHEST).view(-1, len(scales)).T)


def by_column(
    x: Tensor, experts: int, ends: tuple[Tensor, Tensor] | None = None, long: int = 0
) -> tuple[Tensor, Tensor]:
    """As kernels.expert_casts.by_column, in plain torch."""
    if ends is None:
        parts = x.view(-1, experts, x.shape[1]).permute(1, 2, 0)
        largest = parts.abs().amax(2).float().clamp_min(LEAST_LARGEST)
        small = (parts.float() * (HIGHEST / largest)[:, :, None]).to(VALUES)
        return small.contiguous(), largest / HIGHEST
    rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
    expert = torch.searchsorted(ends[0], rows, right=True)
    largest = x.new_full((experts, x.shape[1]), LEAST_LARGEST, dtype=torch.float32)
    largest.scatter_reduce_(0, expert[:, None].expand_as(x), x.abs().float(), "amax")
    small = (x.float() * (HIGHEST / largest)[expert]).to(VALUES)
    before, begin = (F.pad(one, (1, 0))[expert] for one in ends)
    turned = x.new_zeros(long, x.shape[1], dtype=torch.uint8)
    turned.index_copy_(0, (rows - before + begin).long(), small.view(torch.uint8))
    return turned.T.contiguous().view(VALUES), largest / HIGHEST


def multiplied(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], ends: Tensor) -> Tensor:
    """Grouped products of factors in 8 bits with their scales, bf16, as torch.grouped_mm has them.

    Of left [rows, k] and right [experts, k, n]: [rows, n]; of left [m, long] and right [long, n],
    whose parts end at `ends`: [experts, m, n].
    """
    (a, by_a), (b, by_b) = left, right
    if a.is_cuda:
        return F.scaled_grouped_mm(  # type: ignore[attr-defined, no-any-return]
            a, b, by_a, ScalingType.RowWise, by_b, ScalingType.RowWise, offs=ends,
            output_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
    parts = list(experts.slices(ends))
    if b.dim() == 3:
        found = torch.empty(len(a), b.shape[2], dtype=torch.bfloat16)
        for expert, mine in parts:
            made = a[mine].float() @ b[expert].float()
            found[mine] = made * by_a[mine, None] * by_b[expert]
        return found
    rows, columns = by_a.view(len(ends), -1, 1), by_b.view(len(ends), 1, -1)
    products = [a[:, mine].float() @ b[mine].float() for _, mine in parts]
    return (torch.stack(products) * rows * columns).bfloat16()


@dataclass(frozen=True, slots=True)
class EightBitExperts:
    """Products of experts' rows in 8 bits."""

    by_row: CastsRows = by_row
    by_column: CastsColumns = by_column

    def read(self, rows: Tensor) -> Tensor:
        """Bytes [rows, in + BEHIND]."""
        read = rows.new_empty(len(rows), rows.shape[1] + BEHIND, dtype=torch.uint8)
        values, scales = _parts(read)
        self.by_row(rows.contiguous(), values, scales[None])
        return read

    def entering(self, read: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """As Grouped."""
        count, values = len(ends), torch.empty_like(weight, dtype=VALUES)
        scales = weight.new_empty(count, len(weight) // count, dtype=torch.float32)
        self.by_row(weight, values, scales)
        return _of_rows(read, (experts.entering(values, count), scales), ends)

    def leaving(self, read: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """As Grouped."""
        values, scales = self.by_column(weight, len(ends))
        return _of_rows(read, (values.transpose(1, 2), scales), ends)

    def read_again(self, rows: Tensor, ends: Tensor) -> Turned:
        """Transposed."""
        return self._turned(rows, Ends.of(ends, len(rows)))

    def add(
        self, total: Tensor, *, fresh: bool, factors: Factors, ends: Tensor, by: experts.Put
    ) -> None:
        """As Grouped: a gradient is rounded to 16 bits before it is added."""
        gradient, rows = factors
        turned = self._turned(gradient, rows.ends)
        left, right = (turned.values, turned.scales), (rows.values.T, rows.scales)
        made = multiplied(left, right, rows.ends.turned)
        del turned, left
        by(experts.leaving(total, len(ends)), made, fresh=fresh)

    def _turned(self, rows: Tensor, ends: Ends) -> Turned:
        both = ends.rows, ends.turned
        values, scales = self.by_column(rows.contiguous(), len(ends.rows), both, ends.long)
        return Turned(values, scales.flatten(), ends)


def _of_rows(read: Tensor, matrices: tuple[Tensor, Tensor], ends: Tensor) -> Tensor:
    values, scales = _parts(read)
    if not len(values):
        return scales.new_empty(0, matrices[0].shape[2], dtype=torch.bfloat16)
    return multiplied((values, scales.contiguous()), matrices, ends)


def _parts(read: Tensor) -> tuple[Tensor, Tensor]:
    """Values [rows, in] and scales fp32 [rows] of rows as they are read."""
    width = read.shape[1] - BEHIND
    scales = read[:, width : width + 4].view(torch.float32)
    return read[:, :width].view(VALUES), scales[:, 0]


EXPERTS = EightBitExperts()
