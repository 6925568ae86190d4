"""Communicators between ranks: for tensors, for messages, and for what ranks agree on.

A rank's collectives of a group run in the order of its program, on one thread at a time. Values
that ranks agree on (the gradients' norm, losses, commits of checkpoints) have a separate group that
needs no GPU: other threads call it, and no CPU value should have to pass a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from bigplan.content import Holds
from bigplan.graph.strategy import Strategy
from bigplan.ranks import Channel, Coordinates, GroupName, channels, communicating, members
from bigplan.runtime.parallel.apart import Apart
from bigplan.runtime.parallel.group import ALONE, RankGroup

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
NCCL_BLOCKS = 64  # of a kernel at most, each on a multiprocessor, where NCCL is held to no fewer


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a rank; of one rank there is nothing to communicate."""

    at: Coordinates
    strategy: Strategy
    shard: RankGroup = ALONE  # ranks that share one copy of state: all data-parallel ones, or some
    replica: RankGroup = ALONE  # with zero groups: the ranks with the same part of their copies
    tensor: RankGroup = ALONE
    context: RankGroup = ALONE
    expert: RankGroup = ALONE
    expert_data: RankGroup = ALONE
    update: RankGroup = ALONE
    channels: tuple[Channel, ...] = ()  # of all ranks, in one order
    apart: Apart | None = None  # None: all ranks see one run folder
    _control: dist.ProcessGroup | None = field(default=None, repr=False)
    _out: Mapping[Holds, tuple[Channel, dist.ProcessGroup]] = field(
        default_factory=dict, repr=False
    )
    _into: Mapping[Holds, tuple[Channel, dist.ProcessGroup]] = field(
        default_factory=dict, repr=False
    )

    @classmethod
    def alone(cls, strategy: Strategy, apart: Apart | None = None) -> Groups:
        """The groups of a run of one rank."""
        return cls(Coordinates.of(0, strategy), strategy, apart=apart)

    @classmethod
    def join(
        cls,
        rank: int,
        strategy: Strategy,
        backend: str,
        meeting: Path | Store,
        *,
        lends_table: bool = False,
        muon: bool = False,
    ) -> Groups:
        """Meet the other ranks: each writes its address to a file, or where else ranks of several
        nodes meet, and reads those of the others.

        `backend`: of torch.distributed, for tensors; through gloo those of a GPU go by way of host
        memory, which is what ranks that share a GPU need. `lends_table`: as in Graph. `muon`: as in
        communicating. No TCPStore: it listens on all interfaces, and whoever connects can read and
        set its keys.
        """
        at = Coordinates.of(rank, strategy)
        dist.init_process_group(
            "gloo",
            store=store_of(meeting, strategy.ranks),
            rank=rank,
            world_size=strategy.ranks,
            timeout=COLLECTIVE_TIMEOUT,
        )
        control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        every = tuple(channels(strategy, lends_table=lends_table))
        names = communicating(strategy, muon=muon)
        make = partial(_communicator, backend, _most_at_once(strategy, names, every))
        # Every rank makes all groups, in one order.
        made = {name: _group(name, at, strategy, make) for name in names}
        out, into = _connected(rank, every, make)
        return cls(
            at,
            strategy,
            shard=made.get(GroupName.SHARD if strategy.zero_group else GroupName.DATA, ALONE),
            replica=made.get(GroupName.REPLICA, ALONE),
            tensor=made.get(GroupName.TENSOR, ALONE),
            context=made.get(GroupName.CONTEXT, ALONE),
            expert=made.get(GroupName.EXPERT, ALONE),
            expert_data=made.get(GroupName.EXPERT_DATA, ALONE),
            update=made.get(GroupName.UPDATE, ALONE),
            channels=every,
            _control=control,
            _out=out,
            _into=into,
        )

    def warm(self, device: torch.device) -> None:
        """Let communicators connect, and take their buffers, before anybody takes memory."""
        self.all_true(flag=True)
        for group in (self.shard, self.replica, self.tensor, self.expert_data, self.update):
            group.warm(device)
        for group in (self.context, self.expert):
            group.warm(device, exchanges=True)
        rank, first = self.at.rank(self.strategy), torch.zeros(1, device=device)
        for channel in self.channels:  # in one order, so nobody waits in a circle
            if channel.sender == rank:
                self.send(channel.kind, first)
            elif channel.receiver == rank:
                self.receive(channel.kind, first)

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.at == Coordinates(0, 0, 0)

    @property
    def first_here(self) -> bool:
        """Whether this rank speaks for all that see its run folder."""
        return self.first if self.apart is None else self.apart.speaks(self.at.rank(self.strategy))

    def send(self, kind: Holds, values: Tensor) -> None:
        """To the neighbour that takes messages of this kind."""
        channel, group = self._out[kind]
        host = values.is_cuda and dist.get_backend(group) == "gloo"
        if values.is_cuda and not host:
            self._meet(channel)
        dist.send(values.cpu() if host else values, channel.receiver, group=group)

    def receive(self, kind: Holds, values: Tensor) -> None:
        """Fill `values` with the next message of this kind."""
        channel, group = self._into[kind]
        host = values.is_cuda and dist.get_backend(group) == "gloo"
        if values.is_cuda and not host:
            self._meet(channel)
        into = torch.empty_like(values, device="cpu") if host else values
        dist.recv(into, channel.sender, group=group)
        if host:
            values.copy_(into)

    def _meet(self, channel: Channel) -> None:
        """Wait until this stream has come so far, and the other side's, too.

        A kernel of NCCL that waits for its peer must never keep the peer from coming. CUDA loads a
        module only when no kernel runs, and a kernel's first launch loads its module. So two stages
        whose receives waited on their GPUs for each other's first passes waited for ever.
        """
        reached = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        reached.record()
        reached.synchronize()
        meet(channel, self.at.rank(self.strategy), self._control)

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
        for group in (self.shard, self.expert_data):
            if group.copy_engines is not None:
                group.copy_engines.close()
        if self._control is not None and dist.is_initialized():
            dist.destroy_process_group()


def meet(channel: Channel, rank: int, group: dist.ProcessGroup | None) -> None:
    """Return once both ends of a channel have called this for their next message.

    Two ranks may have channels of one kind both ways, so the way is part of the messages' tag.
    """
    tag = 2 * list(Holds).index(channel.kind) + (channel.sender < channel.receiver)
    other = channel.receiver if rank == channel.sender else channel.sender
    told = dist.isend(torch.zeros(1), other, group=group, tag=tag)
    dist.recv(torch.zeros(1), other, group=group, tag=tag)
    assert told is not None, "this rank is none of the group"
    told.wait()


def store_of(meeting: Path | Store, ranks: int) -> Store:
    """A file as a store for so many ranks; a store as it is."""
    if isinstance(meeting, Store):
        return meeting
    store: Store = dist.FileStore(str(meeting), ranks)  # type: ignore[attr-defined]
    store.set_timeout(COLLECTIVE_TIMEOUT)
    return store


_Make = Callable[[Sequence[int]], dist.ProcessGroup]  # of these ranks


def _most_at_once(strategy: Strategy, names: Sequence[GroupName], every: Sequence[Channel]) -> int:
    """Communicators of one rank that may be under way together."""
    messages = Counter(rank for channel in every for rank in (channel.sender, channel.receiver))
    tensors = len(names) - (strategy.zero_group > 0)  # two take turns
    return tensors + max(messages.values(), default=0)


def ranks_of_all(name: GroupName, strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    """The ranks of every group of that name, in one order on all ranks."""
    every = (Coordinates.of(rank, strategy) for rank in range(strategy.ranks))
    return tuple(dict.fromkeys(members(name, one, strategy) for one in every))


def _group(name: GroupName, at: Coordinates, strategy: Strategy, make: _Make) -> RankGroup:
    """This rank's group of that name; for one rank none is made."""
    mine = members(name, at, strategy)
    found = ALONE
    for each in ranks_of_all(name, strategy):
        if len(each) > 1:
            made = make(each)
            if each == mine:
                found = RankGroup(len(mine), mine.index(at.rank(strategy)), made)
    return found


def _communicator(backend: str, number: int, ranks: Sequence[int]) -> dist.ProcessGroup:
    """One of so many of a rank; on a GPU its kernels leave room for those of all the others.

    Such kernels wait for their peers. If one communicator's kernels filled this GPU and another's
    filled the peer's GPU, both would wait for ever.
    """
    options = None
    if backend == "nccl":
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        share = device.multi_processor_count // number
        if share < NCCL_BLOCKS:
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = share
            options._timeout = COLLECTIVE_TIMEOUT
    made: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=COLLECTIVE_TIMEOUT, backend=backend, pg_options=options
    )
    return made


_Ends = dict[Holds, tuple[Channel, dist.ProcessGroup]]


def _connected(rank: int, every: Iterable[Channel], make: _Make) -> tuple[_Ends, _Ends]:
    """By kind: where this rank sends messages, and where it receives them."""
    out: _Ends = {}
    into: _Ends = {}
    for channel in every:
        pair = sorted((channel.sender, channel.receiver))
        made = make(pair)
        if rank in pair:
            ends = out if rank == channel.sender else into
            ends[channel.kind] = channel, made
    return out, into
