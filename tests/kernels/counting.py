"""Stand-ins for kernels, which count the bytes that they are given and compute nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor


class Counting:
    """In place of a kernel: what it is given of each name, unwritten.

    `again`: names of what it reads and then writes.
    """

    def __init__(self, kernel: Any, again: Collection[str]) -> None:
        self.names = list(inspect.signature(kernel.fn).parameters)
        self.__name__ = kernel.__name__
        self.again = again
        self.nbytes = list[int]()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launched

    def _launched(self, *arguments: object, **constants: object) -> None:
        given = dict(zip(self.names, arguments, strict=False))
        tensors = {x.data_ptr(): x for x in given.values() if isinstance(x, Tensor)}
        again = [x for name, x in given.items() if name in self.again]
        self.nbytes.append(sum(x.nbytes for x in (*tensors.values(), *again)))  # type: ignore[attr-defined]


def in_place_of(
    kernels: Mapping[str, Sequence[tuple[ModuleType, str]]],
    again: Collection[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, list[Counting]]:
    """Stand-ins by the names of operators, each for kernels of a module.

    `again`: kernels, and what they read and then write.
    """
    found = dict[str, list[Counting]]()
    for operator, programs in kernels.items():
        found[operator] = []
        for module, name in programs:
            stand_in = Counting(getattr(module, name), {x for of, x in again if of == name})
            monkeypatch.setattr(module, name, stand_in)
            found[operator].append(stand_in)
    return found
