"""Which elements dropout keeps, in NumPy's 32 bits: the formula written once more."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def _mixed(words: Words) -> Words:
    words = (words ^ words >> np.uint32(16)) * np.uint32(0x7FEB352D)
    words = (words ^ words >> np.uint32(15)) * np.uint32(0x846CA68B)
    return words ^ words >> np.uint32(16)


class Drawn:
    """Random words of one layer's target."""

    def __init__(self, seed: int, layer: int, target: str) -> None:
        digest = blake2b(f"{seed} {layer} {target}".encode(), digest_size=8).digest()
        self.of_rows, self.of_columns = np.frombuffer(digest, ">u4").astype(np.uint32)

    def kept(
        self,
        rate: float,
        sequences: Sequence[int],
        positions: Sequence[int],
        columns: Sequence[int],
    ) -> NDArray[np.bool_]:
        """Of every token of these sequences, one behind the other: [tokens, columns]."""
        of_sequences = _mixed(np.uint32(0x9E3779B1) * np.array(sequences, np.uint32) + self.of_rows)
        places = np.uint32(0x85EBCA77) * np.array(positions, np.uint32)
        rows = _mixed(of_sequences[:, None] + places).reshape(-1, 1)
        beside = np.uint32(0xC2B2AE3D) * np.array(columns, np.uint32) + self.of_columns
        return _mixed(rows + _mixed(beside)) >= np.uint32(int(rate * 2**32))
