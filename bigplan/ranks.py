"""Coordinates of ranks, the groups that a rank belongs to, and the channels of its messages.

Tensor-parallel ranks have neighbouring numbers, because they exchange the most. Data-parallel ranks
come next, and pipeline stages are outermost: rank = (stage * shards + data) * tp + tensor.

Context-parallel ranks are neighbours among the data-parallel ones, as which they share state and
sum gradients: data = replica * cp + part of the sequences.

Expert-parallel ranks are neighbours among the data-parallel ones, too, context-parallel ones among
them: the rank at place data % ep has that part of the experts.

Ranks of a zero group are neighbours among the data-parallel ones, too: those with the same
data // zero_group share one copy of states, and those with the same data % zero_group have equal
parts. A group has all experts once or several times, so that ranks with equal parts have the same
experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from bigplan.content import Holds
from bigplan.graph.strategy import Strategy


class GroupName(StrEnum):
    """Groups of ranks that communicate."""

    ALL = "all"
    DATA = "data-parallel"  # same stage and tensor place; the ranks split samples and state
    SHARD = "zero-group"  # neighbours of a data-parallel group that share one copy of its state
    REPLICA = "zero-replicas"  # those of a data-parallel group with the same part of their copies
    UPDATE = "update"  # those that share a copy of states, for what Muon's updates gather
    CONTEXT = "context-parallel"  # those of one replica; the ranks split its sequences
    TENSOR = "tensor-parallel"  # same stage and data place; the ranks split layers
    EXPERT = "expert-parallel"  # neighbours of a data-parallel group that have all experts together
    EXPERT_DATA = "expert-data-parallel"  # those of a zero group, or of all, with the same experts


class Coordinates(NamedTuple):
    """A rank's pipeline stage, data-parallel place and tensor-parallel place, all from 0."""

    stage: int
    data: int
    tensor: int

    @classmethod
    def of(cls, rank: int, strategy: Strategy) -> Coordinates:
        """The coordinates of rank number `rank`."""
        assert 0 <= rank < strategy.ranks, (rank, strategy.ranks)
        rest, tensor = divmod(rank, strategy.tp)
        stage, data = divmod(rest, strategy.shards)
        return cls(stage, data, tensor)

    def rank(self, strategy: Strategy) -> int:
        """The number of the rank at these coordinates."""
        return (self.stage * strategy.shards + self.data) * strategy.tp + self.tensor


def seat(rank: int, strategy: Strategy) -> int:
    """Where the rank is where nodes are filled in turn, those of the first group of replicas first.

    The ranks of a group lie on its own nodes, in order. With replicas that are all alike it is the
    rank's number.
    """
    at, first = Coordinates.of(rank, strategy), 0
    for group in strategy.replicas:
        shards = group.number * strategy.cp
        if at.data < first + shards:
            within = (at.stage * shards + at.data - first) * strategy.tp + at.tensor
            return first * strategy.tp * strategy.pp + within
        first += shards
    return rank


def members(name: GroupName, at: Coordinates, strategy: Strategy) -> tuple[int, ...]:
    """The ranks of the group `name` that includes the rank at `at`, in order."""
    match name:
        case GroupName.ALL:
            return tuple(range(strategy.ranks))
        case GroupName.DATA:
            each = [at._replace(data=i) for i in range(strategy.shards)]
        case GroupName.SHARD | GroupName.UPDATE:
            ranks = strategy.zero_group or strategy.shards
            first = at.data - at.data % ranks
            each = [at._replace(data=first + i) for i in range(ranks)]
        case GroupName.REPLICA:
            ranks = strategy.zero_group or strategy.shards
            same = range(at.data % ranks, strategy.shards, ranks)
            each = [at._replace(data=i) for i in same]
        case GroupName.CONTEXT:
            first = at.data - at.data % strategy.cp
            each = [at._replace(data=first + i) for i in range(strategy.cp)]
        case GroupName.TENSOR:
            each = [at._replace(tensor=i) for i in range(strategy.tp)]
        case GroupName.EXPERT:
            first = at.data - at.data % strategy.ep
            each = [at._replace(data=first + i) for i in range(strategy.ep)]
        case GroupName.EXPERT_DATA:
            ranks = strategy.zero_group or strategy.shards
            first = at.data - at.data % ranks
            same = range(first + at.data % strategy.ep, first + ranks, strategy.ep)
            each = [at._replace(data=i) for i in same]
    return tuple(one.rank(strategy) for one in each)


def communicating(strategy: Strategy, *, muon: bool = False) -> tuple[GroupName, ...]:
    """The groups of several ranks whose tensors need a communicator, in the order of making.

    `muon`: the optimizer is Muon, whose updates of what ZeRO shards gather directions, on another
    lane than gradients and parameters.
    """
    hybrid = strategy.zero_group > 0
    sizes = {
        # Groups of ranks and their replicas together reach all that DATA has.
        GroupName.DATA: 1 if hybrid else strategy.shards,
        GroupName.SHARD: strategy.zero_group if hybrid else 1,
        GroupName.REPLICA: strategy.zero_copies if hybrid else 1,
        GroupName.TENSOR: strategy.tp,
        GroupName.CONTEXT: strategy.cp,
        GroupName.EXPERT: strategy.ep,
        GroupName.EXPERT_DATA: strategy.expert_shards() if strategy.ep > 1 else 1,
        GroupName.UPDATE: strategy.zero_ranks if muon else 1,
    }
    return tuple(name for name, size in sizes.items() if size > 1)


# For each kind of message, the number of stages from sender to receiver.
ONWARD = {Holds.HIDDEN: 1, Holds.HIDDEN_GRADIENT: -1}


# Messages about a table that the first and the last layer share. Its parameters go from the first
# stage to the last (1), its gradients from the last to the first (-1).
LENT = {Holds.PARAMETERS: 1, Holds.PARTIAL_GRADIENTS: -1}


class Channel(NamedTuple):
    """A channel for one kind of message from one rank to another."""

    kind: Holds
    sender: int
    receiver: int


def channels(strategy: Strategy, *, lends_table: bool) -> Iterator[Channel]:
    """All channels of a run.

    Channels connect neighbouring stages. With virtual stages, channels also connect the last stage
    and the first. Where the first stage lends its table to the last, the table has channels too.
    Each pair of ranks, direction and kind has its own channel. So messages of a channel keep their
    order, and wait for no message of another channel.
    """
    every = [Coordinates.of(rank, strategy) for rank in range(strategy.ranks)]
    for kind, step in ONWARD.items():
        for at in every:
            stage = at.stage + step
            if strategy.pp > 1 and (strategy.vpp > 1 or 0 <= stage < strategy.pp):
                receiver = at._replace(stage=stage % strategy.pp)
                yield Channel(kind, at.rank(strategy), receiver.rank(strategy))
    for kind, way in LENT.items() if lends_table else ():
        ends = (0, strategy.pp - 1)[::way]
        for at in every:
            if at.stage == ends[0]:
                receiver = at._replace(stage=ends[1])
                yield Channel(kind, at.rank(strategy), receiver.rank(strategy))
