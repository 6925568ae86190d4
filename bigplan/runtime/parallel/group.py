"""A communicator: ranks that sum tensors, or bring their parts together.

A collective on a separate stream may still be under way when its call returns. So a function that
begins one returns a function that waits for it, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has other names for them, and warns of those that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Begun = Callable[[], Tensor]  # waits for a collective that has begun; what came of it


@dataclass(frozen=True, slots=True)
class CopyEngines:
    """A second communicator of a group, whose gathers within `memory` run no kernel.

    `memory`: uint8 [n] of the pool, as long on all ranks.
    """

    made: dist.ProcessGroup
    pool: torch.cuda.MemPool
    memory: Tensor

    def register(self) -> None:
        """Let all ranks map the memory; all of them call it."""
        self._backend.register_mem_pool(self.pool, symm=True)

    def reach(self, values: Tensor) -> bool:
        """Whether they lie in the memory."""
        start = values.data_ptr() - self.memory.data_ptr()
        return start >= 0 and start + values.nbytes <= self.memory.nbytes

    def gather(self, values: Tensor, own: Tensor, mine: Tensor) -> None:
        """Equal parts of [n], one from each rank, to all, once `mine` is in `own`, its place.

        Not on CUDA's null stream, which takes no batches of copies.
        """
        if own.data_ptr() != mine.data_ptr():
            own.copy_(mine)
        _all_gather(values, own, group=self.made)

    def close(self) -> None:
        """Unmap the memory; the GPU must have finished with it."""
        self._backend.deregister_mem_pool(self.pool)

    @property
    def _backend(self) -> Any:
        return self.made._get_backend(self.memory.device)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that exchange tensors; one alone has nothing to exchange."""

    size: int = 1
    place: int = 0  # of this rank
    _made: dist.ProcessGroup | None = field(default=None, repr=False)
    copy_engines: CopyEngines | None = field(default=None, repr=False)

    def warm(self, device: torch.device, *, exchanges: bool = False) -> None:
        """Use each collective once; otherwise NCCL may connect it in the middle of a step.

        Messages take buffers of their own, so a group that `exchanges` does nothing else.
        """
        if self._made is not None and exchanges:
            self.exchanged(torch.zeros(self.size, device=device))
        elif self._made is not None:
            values = torch.zeros(self.size, device=device)
            self.all_reduce(values)
            self.reduce_scatter(values)
            self.all_gather(values, self.own(values))

    def all_reduce(self, values: Tensor) -> None:
        """Sum over the ranks, in place."""
        if self._made is not None:
            with self._reachable(values) as reached:
                dist.all_reduce(reached, group=self._made)

    def reduce_scatter(self, values: Tensor) -> None:
        """Sum equal parts of [n] over the ranks; only this rank's own part is meaningful after."""
        if self._made is None:
            return
        if self.is_gloo:
            # Its reduce-scatter took 14 times as long as its all-reduce of 64 MiB.
            self.all_reduce(values)
            return
        _reduce_scatter(self.own(values), values, group=self._made)

    def all_gather(self, values: Tensor, mine: Tensor) -> None:
        """Equal parts of [n], one from each rank, to all; `mine` may be in its place already."""
        if self.copy_engines is not None and self.copy_engines.reach(values):
            self.copy_engines.gather(values, self.own(values), mine)
            return
        if self._made is None:
            if values.data_ptr() != mine.data_ptr():
                values.copy_(mine)
            return
        with self._reachable(values) as reached:
            if reached is not values:
                mine = mine.cpu()
            _all_gather(reached, mine, group=self._made)

    def gathered(self, mine: Tensor) -> Begun:
        """Begin to bring equal parts [n, ...] together: [size * n, ...]."""
        if self._made is None:
            return lambda: mine
        whole = mine.new_empty(self.size * mine.shape[0], *mine.shape[1:])
        if self.is_gloo:
            self.all_gather(whole, mine.contiguous())
            return lambda: whole
        work = _all_gather(whole, mine.contiguous(), group=self._made, async_op=True)
        return partial(_done, work, whole)

    def scattered(self, values: Tensor) -> Begun:
        """Begin to sum [size * n, ...] over the ranks: this rank's part [n, ...], in new memory.

        `values` are nobody's afterwards.
        """
        if self._made is None:
            return lambda: values
        if self.is_gloo:
            self.all_reduce(values)
            mine = self.own(values).clone()
            return lambda: mine
        mine = values.new_empty(values.shape[0] // self.size, *values.shape[1:])
        work = _reduce_scatter(mine, values.contiguous(), group=self._made, async_op=True)
        return partial(_done, work, mine)

    def reduced(self, values: Tensor) -> Begun:
        """Begin to sum over the ranks, in place."""
        if self._made is None or self.is_gloo:
            self.all_reduce(values)
            return lambda: values
        work = dist.all_reduce(values, group=self._made, async_op=True)
        return partial(_done, work, values)

    def exchanged(self, parts: Tensor) -> Tensor:
        """Part i of [size, ...] to rank i; what each rank sent here, by rank."""
        if self._made is None:
            return parts
        sent = parts.contiguous()
        into = torch.empty_like(sent)
        if sent.is_cuda and self.is_gloo:
            on_host = sent.cpu()
            received = torch.empty_like(on_host)
            dist.all_to_all_single(received, on_host, group=self._made)
            return into.copy_(received)
        dist.all_to_all_single(into, sent, group=self._made)
        return into

    def exchanged_rows(self, rows: Tensor, out: Sequence[int], into: Sequence[int]) -> Begun:
        """Begin to send rows [n, ...] in order, out[i] of them to rank i.

        into[i] come from rank i: they lie by rank.
        """
        if self._made is None:
            return lambda: rows
        sent, sizes = rows.contiguous(), (list(into), list(out))
        found = rows.new_empty(sum(into), *rows.shape[1:])
        if self.is_gloo:
            received = found.cpu()
            dist.all_to_all_single(received, sent.cpu(), *sizes, group=self._made)
            return lambda: found.copy_(received)
        work = dist.all_to_all_single(found, sent, *sizes, group=self._made, async_op=True)
        return partial(_done, work, found)

    def own(self, values: Tensor) -> Tensor:
        """This rank's of as many equal parts of [n, ...] as there are ranks."""
        part = values.shape[0] // self.size
        return values[self.place * part : (self.place + 1) * part]

    @property
    def is_gloo(self) -> bool:
        """Whether its collectives go by way of host memory."""
        return self._made is not None and dist.get_backend(self._made) == "gloo"

    @contextmanager
    def _reachable(self, values: Tensor) -> Iterator[Tensor]:
        """The values where the backend takes them: gloo does not on a GPU."""
        if not (values.is_cuda and self.is_gloo):
            yield values
            return
        on_host = values.cpu()
        yield on_host
        values.copy_(on_host)


ALONE = RankGroup()


def _done(work: dist.Work, values: Tensor) -> Tensor:
    """The values, once the current stream has waited for the collective."""
    work.wait()
    return values
