"""Who a rank is: its coordinates, the groups that it belongs to, and whom it sends messages.

Tensor-parallel ranks are neighbours, since they exchange the most; then come the data-parallel
ones, and pipeline stages are outermost: rank = (stage * dp + data) * tp + tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from bigplan.content import Holds
from bigplan.graph.strategy import Strategy


class GroupName(StrEnum):
    """Ranks that communicate, by what they share out."""

    ALL = "all"
    DATA = "data-parallel"  # same stage and tensor coordinate: they share out samples and state
    TENSOR = "tensor-parallel"


class Coordinates(NamedTuple):
    """A rank's pipeline stage, data-parallel and tensor-parallel place; all count from 0."""

    stage: int
    data: int
    tensor: int

    @classmethod
    def of(cls, rank: int, strategy: Strategy) -> Coordinates:
        """The coordinates of rank number `rank`."""
        assert 0 <= rank < strategy.ranks, (rank, strategy.ranks)
        rest, tensor = divmod(rank, strategy.tp)
        stage, data = divmod(rest, strategy.dp)
        return cls(stage, data, tensor)

    def rank(self, strategy: Strategy) -> int:
        """The number of the rank."""
        return (self.stage * strategy.dp + self.data) * strategy.tp + self.tensor


def members(name: GroupName, at: Coordinates, strategy: Strategy) -> tuple[int, ...]:
    """The ranks of the group of that name that the rank at `at` belongs to, in order."""
    match name:
        case GroupName.ALL:
            return tuple(range(strategy.ranks))
        case GroupName.DATA:
            each = [at._replace(data=i) for i in range(strategy.dp)]
        case GroupName.TENSOR:
            each = [at._replace(tensor=i) for i in range(strategy.tp)]
    return tuple(one.rank(strategy) for one in each)


# Stages by which a kind of message moves on.
ONWARD = {Holds.HIDDEN: 1, Holds.HIDDEN_GRADIENT: -1}


# Between the ends of a pipeline, of a table that the first and the last layer share.
LENT = {Holds.PARAMETERS: 1, Holds.PARTIAL_GRADIENTS: -1}


class Channel(NamedTuple):
    """The way of one kind of message from one rank to another."""

    kind: Holds
    sender: int
    receiver: int


def channels(strategy: Strategy, *, lends_table: bool) -> Iterator[Channel]:
    """All of a run: between neighbouring stages; virtual ones go from the last to the first too.

    Where the first stage lends its table to the last, those of the table besides. One for each
    pair, direction and kind: messages of one keep their order and wait for no other's.
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
