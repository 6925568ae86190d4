"""Communicators between ranks: for tensors, for messages, and for what ranks agree on.

A rank's collectives of a group run in one order, on one thread at a time, as its program has them.
What ranks agree on (the gradients' norm, losses, commits of checkpoints) has a group of its own
that needs no GPU: it is asked from other threads, and no CPU value should have to pass a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bigplan.content import Holds
from bigplan.graph.strategy import Strategy
from bigplan.ranks import Channel, Coordinates, GroupName, channels, members

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# torch 2.13 has other names for them, and warns of those that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a rank; of one rank there is nothing to communicate."""

    at: Coordinates
    strategy: Strategy
    _data: dist.ProcessGroup | None = field(default=None, repr=False)
    _control: dist.ProcessGroup | None = field(default=None, repr=False)
    _out: Mapping[Holds, tuple[Channel, dist.ProcessGroup]] = field(
        default_factory=dict, repr=False
    )
    _into: Mapping[Holds, tuple[Channel, dist.ProcessGroup]] = field(
        default_factory=dict, repr=False
    )

    @classmethod
    def alone(cls, strategy: Strategy) -> Groups:
        """Of a run of one rank."""
        return cls(Coordinates.of(0, strategy), strategy)

    @classmethod
    def join(cls, rank: int, strategy: Strategy, backend: str, meeting: Path) -> Groups:
        """Meet the other ranks: each writes its address to the file, and reads those of the others.

        `backend`: of torch.distributed, for tensors; through gloo those of a GPU go by way of host
        memory, which is what ranks that share a GPU need. No TCPStore: it listens on all
        interfaces, and whoever connects can read and set its keys.
        """
        at = Coordinates.of(rank, strategy)
        store = dist.FileStore(str(meeting), strategy.ranks)  # type: ignore[attr-defined]
        store.set_timeout(COLLECTIVE_TIMEOUT)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=strategy.ranks,
            timeout=COLLECTIVE_TIMEOUT,
        )
        control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        data = _communicator(GroupName.DATA, at, strategy, backend)
        out, into = _channels(rank, strategy, backend)
        return cls(at, strategy, data, control, out, into)

    def warm(self, device: torch.device) -> None:
        """Let communicators connect, and take their buffers, before anybody takes memory."""
        self.all_true(flag=True)
        if self._data is not None:
            self.all_reduce(torch.zeros(self.strategy.dp, device=device))
        rank, first = self.at.rank(self.strategy), torch.zeros(1, device=device)
        for channel in channels(self.strategy):  # in one order, so nobody waits in a circle
            if channel.sender == rank:
                self.send(channel.kind, first)
            elif channel.receiver == rank:
                self.receive(channel.kind, first)

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.at == Coordinates(0, 0, 0)

    def all_reduce(self, values: Tensor) -> None:
        """Sum over the data-parallel ranks, in place."""
        with self._reachable(values) as reached:
            dist.all_reduce(reached, group=self._data)

    def reduce_scatter(self, values: Tensor) -> None:
        """Sum equal parts of [n] over the ranks; only this rank's own part is meaningful after."""
        if self._is_gloo:
            # Its reduce-scatter took 14 times as long as its all-reduce of 64 MiB.
            self.all_reduce(values)
            return
        _reduce_scatter(self.own(values), values, group=self._data)

    def all_gather(self, values: Tensor, mine: Tensor) -> None:
        """Equal parts of [n], one from each rank, to all; `mine` may be in its place already."""
        with self._reachable(values) as reached:
            if reached is not values:
                mine = mine.cpu()
            _all_gather(reached, mine, group=self._data)

    def send(self, kind: Holds, values: Tensor) -> None:
        """To the neighbour that takes messages of this kind."""
        channel, group = self._out[kind]
        host = values.is_cuda and dist.get_backend(group) == "gloo"
        dist.send(values.cpu() if host else values, channel.receiver, group=group)

    def receive(self, kind: Holds, values: Tensor) -> None:
        """Fill `values` with the next message of this kind."""
        channel, group = self._into[kind]
        host = values.is_cuda and dist.get_backend(group) == "gloo"
        into = torch.empty_like(values, device="cpu") if host else values
        dist.recv(into, channel.sender, group=group)
        if host:
            values.copy_(into)

    def own(self, values: Tensor) -> Tensor:
        """This rank's of as many equal parts of [n] as there are data-parallel ranks."""
        part = values.numel() // self.strategy.dp
        return values[self.at.data * part : (self.at.data + 1) * part]

    @property
    def _is_gloo(self) -> bool:
        return self._data is not None and dist.get_backend(self._data) == "gloo"

    @contextmanager
    def _reachable(self, values: Tensor) -> Iterator[Tensor]:
        """The values where the backend takes them: gloo does not on a GPU."""
        if not (values.is_cuda and self._is_gloo):
            yield values
            return
        on_host = values.cpu()
        yield on_host
        values.copy_(on_host)

    def sum_of_all(self, values: Tensor) -> Tensor:
        """The sum of [n] on the CPU over all ranks: the same bits on each."""
        if self._control is not None:
            dist.all_reduce(values, group=self._control)
        return values

    def all_true(self, flag: bool) -> bool:
        """Whether the flag is set on every rank."""
        flags = torch.tensor(float(not flag))
        return not self.sum_of_all(flags).item()

    def of_all(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor on the CPU, all of one size, by rank."""
        if self._control is None:
            return [mine]
        found = [torch.empty_like(mine) for _ in range(self.strategy.ranks)]
        dist.all_gather(found, mine, group=self._control)
        return found

    def texts_of_all(self, mine: bytes) -> Sequence[bytes]:
        """Every rank's bytes, by rank."""
        sizes = [int(size) for size in self.of_all(torch.tensor([len(mine)]))]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        each = zip(self.of_all(padded), sizes, strict=True)
        return [found[:size].numpy().tobytes() for found, size in each]

    def close(self) -> None:
        """Leave."""
        if self._control is not None and dist.is_initialized():
            dist.destroy_process_group()


def _communicator(
    name: GroupName, at: Coordinates, strategy: Strategy, backend: str
) -> dist.ProcessGroup | None:
    """This rank's of the groups of that name. Every rank makes all of them, in one order."""
    every = (Coordinates.of(rank, strategy) for rank in range(strategy.ranks))
    mine = members(name, at, strategy)
    found = None
    for each in dict.fromkeys(members(name, one, strategy) for one in every):
        made = dist.new_group(list(each), timeout=COLLECTIVE_TIMEOUT, backend=backend)
        found = made if each == mine else found
    return found


_Ends = dict[Holds, tuple[Channel, dist.ProcessGroup]]


def _channels(rank: int, strategy: Strategy, backend: str) -> tuple[_Ends, _Ends]:
    """By kind: where this rank sends messages, and where it receives them."""
    out: _Ends = {}
    into: _Ends = {}
    for channel in channels(strategy):
        pair = [channel.sender, channel.receiver]
        made = dist.new_group(sorted(pair), timeout=COLLECTIVE_TIMEOUT, backend=backend)
        if rank in pair:
            ends = out if rank == channel.sender else into
            ends[channel.kind] = channel, made
    return out, into
