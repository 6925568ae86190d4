"""Ranks of one group as threads of one process, and the turn that a layer has on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from bigplan.graph.graph import Recompute
from bigplan.runtime.layers.sums import Sums
from bigplan.runtime.parallel.group import Begun, RankGroup

Result = TypeVar("Result")
Called = tuple[str, int]  # a collective's pattern, and bytes of the whole tensor
ROWS, ENDS = "rows", "ends of rows"  # ends are a message of these tests alone
PATIENCE = 60.0  # seconds; a rank that skips a collective is found out


@dataclass(slots=True)
class _Meeting:
    """Where all leave a tensor, and nobody goes on before all have read it."""

    size: int
    called: list[Called] = field(default_factory=list)  # in order
    _barrier: Barrier = field(init=False)
    _brought: list[Tensor] = field(init=False)
    _names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._barrier = Barrier(self.size)
        self._brought, self._names = [torch.empty(0)] * self.size, [""] * self.size

    def meet(self, place: int, name: str, mine: Tensor) -> list[Tensor]:
        """What all brought to the same collective, copied; of rows each may bring its number."""
        self._brought[place], self._names[place] = mine, name
        self._barrier.wait(PATIENCE)
        assert len(set(self._names)) == 1, self._names
        assert name == ROWS or len({tensor.shape for tensor in self._brought}) == 1, name
        copies = [tensor.detach().clone() for tensor in self._brought]
        if place == 0 and name != ENDS:
            parts = self.size if name == "all_gather" else 1
            self.called.append((name, parts * mine.nbytes))
        self._barrier.wait(PATIENCE)
        return copies

    def leave(self) -> None:
        """Let nobody wait any longer."""
        self._barrier.abort()


@dataclass(frozen=True, slots=True)
class Neighbour(RankGroup):
    """A rank among such threads."""

    meeting: _Meeting = field(default_factory=lambda: _Meeting(1))

    def gathered(self, mine: Tensor) -> Begun:
        whole = torch.cat(self.meeting.meet(self.place, "all_gather", mine))
        return lambda: whole

    def scattered(self, values: Tensor) -> Begun:
        whole = sum(self.meeting.meet(self.place, "reduce_scatter", values))
        assert isinstance(whole, Tensor)
        mine = self.own(whole).clone()
        return lambda: mine

    def reduced(self, values: Tensor) -> Begun:
        whole = sum(self.meeting.meet(self.place, "all_reduce", values))
        assert isinstance(whole, Tensor)
        values.copy_(whole)
        return lambda: values

    def exchanged(self, parts: Tensor) -> Tensor:
        brought = self.meeting.meet(self.place, "all_to_all", parts)
        return torch.stack([each[self.place] for each in brought])

    def exchanged_rows(self, rows: Tensor, out: Sequence[int], into: Sequence[int]) -> Begun:
        ends = torch.tensor(out).cumsum(0)
        assert int(ends[-1]) == len(rows)
        brought = self.meeting.meet(self.place, ROWS, rows)
        theirs = self.meeting.meet(self.place, ENDS, ends)
        parts = [
            one.tensor_split(where[:-1])[self.place]
            for one, where in zip(brought, theirs, strict=True)
        ]
        assert [len(part) for part in parts] == list(into)
        return lambda: torch.cat(parts)


def side_by_side(
    size: int, work: Callable[[Neighbour], Result]
) -> tuple[list[Result], list[Called]]:
    """What each of so many ranks makes of `work`, and the collectives that they met in."""
    return in_two_ways((size, 1), lambda one, _: work(one))


def in_two_ways(
    sizes: tuple[int, int], work: Callable[[Neighbour, Neighbour], Result]
) -> tuple[list[Result], list[Called]]:
    """The same of ranks in rows of so many, and so many rows: each meets its row and its column.

    The collectives are those of the first rank.
    """
    wide, high = sizes
    rows, columns = (
        [_Meeting(size) for _ in range(number)] for size, number in (sizes, sizes[::-1])
    )

    def run(rank: int) -> Result:
        row, column = divmod(rank, wide)
        try:
            # By their own thread: autograd's one for a device would wait for itself.
            with torch.autograd.set_multithreading_enabled(False):
                beside = Neighbour(wide, column, meeting=rows[row])
                return work(beside, Neighbour(high, row, meeting=columns[column]))
        except BaseException:
            for meeting in (*rows, *columns):
                meeting.leave()
            raise

    with ThreadPoolExecutor(wide * high) as threads:
        found = list(threads.map(run, range(wide * high)))
    return found, [*rows[0].called, *columns[0].called]


@dataclass
class Turn:
    """What a Visit of the runtime is to a layer."""

    flat: Tensor
    tensors: dict[str, Tensor]
    x: Tensor
    by_output: Tensor
    recompute: Recompute
    totals: dict[str, Tensor]
    by_rows: bool = False
    bounds: Tensor | None = None
    drops: None = None
    begins: Tensor | None = None

    def weights(self) -> Tensor:
        return self.flat.view(torch.uint8)

    def parameters(self, number: int = 0) -> dict[str, Tensor]:
        return dict(self.tensors)

    def hidden(self) -> Tensor:
        return self.x

    def gradient(self) -> Tensor:
        return self.by_output

    def open(self, sums: Sums) -> None:
        sums.open(self.totals, fresh=True)
