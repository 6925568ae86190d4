"""Sizes of a gated delta rule on one rank."""

from __future__ import annotations

from typing import NamedTuple

from bigplan.graph.shape import RankShape
from bigplan.mechanics import RULE_CHUNK
from bigplan.spec.mixers import GatedDeltaRule


class Each(NamedTuple):
    """So many of each element: of a tensor as large as queries or values, of keys as each value
    head has them, of a head's scores in a chunk, and of states that chunks begin with.
    """

    queries: float
    values: float
    repeated: float
    scores: float
    states: float = 0.0

    def elements(self, shape: RankShape) -> float:
        """Of a rank together; the last chunk of a sequence counts as full."""
        rule, chunks = rule_of(shape), sequences_of(shape) * chunks_of(shape)
        tokens, (keys, heads) = chunks * RULE_CHUNK, heads_of(shape)
        return (
            self.queries * tokens * keys * rule.key_dim
            + self.values * tokens * heads * rule.value_dim
            + self.repeated * tokens * heads * rule.key_dim
            + self.scores * tokens * heads * RULE_CHUNK
            + self.states * chunks * heads * rule.key_dim * rule.value_dim
        )


def rule_of(shape: RankShape) -> GatedDeltaRule:
    """The rule that the model has."""
    rule = shape.model.delta_rule
    assert rule is not None, shape.model.name
    return rule


def heads_of(shape: RankShape) -> tuple[int, int]:
    """Heads of keys and of values that a rank has within the rule."""
    rule = rule_of(shape)
    keys, values = (heads // shape.tp for heads in (rule.key_heads, rule.value_heads))
    return max(1, keys // shape.cp), values // shape.cp


def sequences_of(shape: RankShape) -> int:
    """Of a micro-batch."""
    return shape.strategy.micro_batch


def chunks_of(shape: RankShape) -> int:
    """Of a sequence, the last one filled up."""
    return -(-shape.mixed_tokens // sequences_of(shape) // RULE_CHUNK)
