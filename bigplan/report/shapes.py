"""What a model's dimensions cost: the same plan priced with a dimension rounded up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bigplan.cost import price
from bigplan.plan import Plan, graph_of
from bigplan.spec.model import ModelSpec

# A load of 16-bit elements; half, whole and doubled tiles. The vocabulary is padded to tiles at
# once, for rows that mean nothing cost next to nothing (Megatron-LM: 128 x tensor parallel).
MULTIPLES = (8, 64, 128, 256)
VOCABULARY_MULTIPLES = (64, 128)
LARGER = 1.1  # a dimension rounded by more is another model
WORTH = 0.005  # of the time of forward and backward: less is within any model's error


@dataclass(frozen=True)
class Rounding:
    """A dimension rounded up; seconds are those of forward and backward, once through all layers.

    `gain` is the share of the time that rounding saves; of the time per FLOP, where the larger
    dimension is of use (words that do not exist are of none).
    """

    dimension: str
    value: int
    rounded: int
    multiple: int
    seconds: float
    rounded_seconds: float
    gain: float


def roundings(plan: Plan) -> Iterator[Rounding]:
    """For each dimension the least rounding that brings what rounding can bring, if it is much."""
    before = _pass(plan, plan.model)
    # Heads are split whole, so tensor parallelism leaves their width alone, and hidden's.
    splits = {"vocab": plan.strategy.tp, "ffn": plan.strategy.tp, "hidden": 1, "head_dim": 1}
    for dimension, split in splits.items():
        value = getattr(plan.model, dimension)
        known = VOCABULARY_MULTIPLES if dimension == "vocab" else MULTIPLES
        multiples = [n * split for n in known]
        tried = [
            _rounding(plan, before, dimension, multiple)
            for multiple in multiples
            if value % multiple and _up(value, multiple) <= LARGER * value
        ]
        best = max((found.gain for found in tried), default=0.0)
        if best > WORTH:
            yield next(found for found in tried if found.gain > best - WORTH)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _rounding(plan: Plan, before: _Pass, dimension: str, multiple: int) -> Rounding:
    value = getattr(plan.model, dimension)
    rounded = _up(value, multiple)
    after = _pass(plan, plan.model.model_copy(update={dimension: rounded}))
    gain = 1 - after.per_flop / before.per_flop
    if dimension == "vocab":
        gain = 1 - after.seconds / before.seconds
    return Rounding(dimension, value, rounded, multiple, before.seconds, after.seconds, gain)


@dataclass(frozen=True)
class _Pass:
    """Forward and backward of all layers, for one micro-batch."""

    seconds: float
    flops: float

    @property
    def per_flop(self) -> float:
        return self.seconds / self.flops


def _pass(plan: Plan, model: ModelSpec) -> _Pass:
    graph = graph_of(plan.model_copy(update={"model": model}))
    costs = price(graph, plan.training, plan.cluster.group)
    seconds = flops = 0.0
    for name in graph.layers:
        kind, cost = graph.kinds[name], costs.kinds[name]
        seconds += cost.forward + cost.backward
        operators = (*kind.forward, *kind.backward)
        flops += sum(getattr(operator, "flops", 0.0) for operator in operators)
    return _Pass(seconds, flops)
