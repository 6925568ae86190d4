"""What torch's operators move and hold, counted as they run."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("aten.bmm", "aten.mm", "aten.linalg_solve_triangular", "aten.triangular_solve")


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes read and written by what is no product, and the most that new tensors take at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: Counter[str] = Counter()
        self.launches = self.live = self.peak = 0
        self._known: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Moved in all."""
        return sum(self.moved.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        read, made = (
            [x for x in tree_leaves(of) if isinstance(x, Tensor)] for of in ((args, kwargs), given)
        )
        places = {x.untyped_storage().data_ptr() for x in read}
        new = [x for x in made if x.untyped_storage().data_ptr() not in places]
        for x in new:
            self._hold(x.untyped_storage())
        if new or func._schema.is_mutable:
            self.launches += 1
            if not str(func).startswith(PRODUCTS):
                written = new or made
                empty = "empty" in str(func)
                self.moved[str(func)] += (
                    0 if empty else sum(x.numel() * x.itemsize for x in (*read, *written))
                )
        return given

    def _hold(self, storage: torch.UntypedStorage) -> None:
        place, nbytes = storage.data_ptr(), storage.nbytes()
        if place in self._known or not nbytes:
            return
        self._known.add(place)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, place, nbytes)

    def _drop(self, place: int, nbytes: int) -> None:
        self._known.discard(place)
        self.live -= nbytes
