"""What a matrix product loses to partial tiles and to its last wave.

A GPU computes the result [m, n] in tiles, one per multiprocessor at a time: a tile that reaches
beyond the matrix works for nothing there, and the last wave of tiles may not fill all
multiprocessors (NVIDIA, "Matrix Multiplication Background User's Guide").
"""

from __future__ import annotations

from math import ceil

from bigplan.graph.operators import Gemm

LONG, SHORT = 256, 128  # the largest tile of cuBLAS on current GPUs, either way round


def tile_lost(gemm: Gemm) -> float:
    """Share of the tiles' area outside the matrix."""
    rows, columns = _tiles(gemm)
    area = rows[0] * rows[1] * columns[0] * columns[1]
    return 1 - gemm.m * gemm.n / area


def wave_lost(gemm: Gemm, multiprocessors: int) -> float:
    """Share of the multiprocessors' time that the last wave leaves idle."""
    rows, columns = _tiles(gemm)
    waves = rows[0] * columns[0] * gemm.batch / multiprocessors
    return 1 - waves / ceil(waves)


def _tiles(gemm: Gemm) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tiles by rows and by columns, each (number, size), the way round that covers least."""
    ways = ((SHORT, LONG), (LONG, SHORT))
    covers = [((-(-gemm.m // a), a), (-(-gemm.n // b), b)) for a, b in ways]
    return min(covers, key=lambda c: c[0][0] * c[0][1] * c[1][0] * c[1][1])
