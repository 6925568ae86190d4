"""Sizes of a state space on one rank."""

from __future__ import annotations

from typing import NamedTuple

from bigplan.graph.shape import RankShape
from bigplan.mechanics import SPACE_CHUNK
from bigplan.spec.mixers import StateSpace


class Rank(NamedTuple):
    """A rank's heads and groups, its sequences, and the chunks of one, the last one filled up."""

    space: StateSpace
    heads: int
    groups: int
    sequences: int
    chunks: int

    @classmethod
    def of(cls, shape: RankShape) -> Rank:
        """The rank of a model whose blocks have a state space."""
        space, sequences = shape.model.state_space, shape.strategy.micro_batch
        assert space is not None, shape.model.name
        chunks = -(-shape.mixed_tokens // sequences // SPACE_CHUNK)
        heads, groups = (n // shape.tp // shape.cp for n in (space.heads, space.groups))
        return cls(space, heads, max(1, groups), sequences, chunks)

    @property
    def batches(self) -> int:
        """Chunks of all groups."""
        return self.sequences * self.chunks * self.groups

    @property
    def head_chunks(self) -> int:
        """Chunks of all heads."""
        return self.sequences * self.chunks * self.heads

    @property
    def beside(self) -> int:
        """Columns of a group's values side by side."""
        return self.heads // self.groups * self.space.head_dim

    @property
    def tokens(self) -> int:
        """Those of all chunks."""
        return self.sequences * self.chunks * SPACE_CHUNK

    @property
    def values(self) -> int:
        """Elements of a tensor as large as values."""
        return self.tokens * self.heads * self.space.head_dim

    @property
    def keys(self) -> int:
        """Elements of keys."""
        return self.tokens * self.groups * self.space.state

    @property
    def states(self) -> int:
        """Elements of the states that chunks begin with."""
        return self.head_chunks * self.space.state * self.space.head_dim


def norms_alone(shape: RankShape) -> bool:
    """Whether no other rank has a part of a group, which a norm is over, if there is one."""
    space = Rank.of(shape).space
    return shape.tp == 1 or space.groups > 1 or not space.norm
