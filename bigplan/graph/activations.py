"""Bytes of activations that one rank keeps between a layer's forward and its backward.

They follow from the steps of a layer (bigplan/spec/layers.py) and are exact:
tests/runtime/layers/test_layers.py compares them with what autograd saves, value by value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigplan.spec.lora import Lora, adapted_steps
from bigplan.spec.mixers import ATTENTION
from bigplan.spec.model import ModelSpec
from bigplan.spec.step import LayerStep, StepOp, StepValue

STATISTIC = 4  # bytes of norm and softmax statistics, fp32 in every precision


def boundary_bytes(model: ModelSpec, tokens: int, element_size: int) -> int:
    """Bytes of a block's input, [tokens, hidden]: all that full recomputation keeps.

    Every tensor-parallel rank holds all of it.
    """
    return tokens * model.hidden * element_size


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What decides the bytes that one rank saves for one block."""

    tokens: int
    sequence_length: int
    element_size: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    expanded_kv: bool = False  # k and v are repeated for every query head
    materialised: bool = False  # attention scores are written to memory
    dropout: bool = False
    routes_own: bool = False  # a rank routes its own tokens alone, so that no value is whole
    exchanging: int = 1  # context-parallel ranks, each with a part of the heads within attention
    lora: Lora | None = None  # all but adapters is frozen

    def __post_init__(self) -> None:
        assert self.tokens % self.sequence_length == 0, (self.tokens, self.sequence_length)

    def nbytes(self, value: StepValue, element_size: int = 0) -> int:
        """Bytes of a value, in the compute dtype unless it has an element size of its own."""
        size = self.tokens * value.columns(self.tensor_parallel)
        whole = value.whole and not self.routes_own
        apart = self.sequence_parallel and not value.split and not whole
        ways = self.tensor_parallel if apart else 1
        return size * (element_size or self.element_size) // ways

    def repeated(self, value: StepValue) -> StepValue:
        """Keys or values with a head at least for each rank that exchanges them."""
        heads = max(-(-value.parts // self.tensor_parallel), self.exchanging)
        return value._replace(parts=heads * self.tensor_parallel) if self.exchanging > 1 else value


def score_bytes(model: ModelSpec, shape: BlockShape) -> int:
    """Bytes saved of materialised attention scores: a s per token; 0 for flash attention.

    The softmax's output, and with dropout its mask of one byte and what it lets through: 5 a s
    bytes a token in 16 bits (arXiv 2205.05198, section 4.1).
    """
    if not shape.materialised or ATTENTION not in model.mixers_of_a_block:
        return 0
    per_score = shape.element_size + (1 + shape.element_size if shape.dropout else 0)
    heads = model.heads // shape.tensor_parallel
    return shape.tokens * shape.sequence_length * shape.exchanging * heads * per_score


def saved_values(
    model: ModelSpec, shape: BlockShape, kind: str = "block"
) -> Mapping[StepValue, int]:
    """Bytes of every value that autograd saves for one layer of a kind and `tokens` tokens.

    A value that several steps save counts once. Parameters and the tables of positions, which all
    blocks share, are not counted. A block's input counts, because its first norm saves it. Its
    output is the next layer's input and does not count, so the sum over layers counts each once.
    """
    found: dict[StepValue, int] = {}
    for step in adapted_steps(model, kind, shape.lora):
        saves, statistics = step.saves, step.statistics
        if step.op is StepOp.ATTENTION:
            queries, *keys_values, mixed = saves
            if model.keys_given and (shape.expanded_kv or shape.exchanging > 1):
                keys_values = list(step.reads[1:])  # another block's, which this one copies
            keys_values = [shape.repeated(value) for value in keys_values]
            if shape.expanded_kv:
                keys_values = [value._replace(parts=queries.parts) for value in keys_values]
            saves = (queries, *keys_values, mixed)
            if shape.exchanging > 1:  # attention saves its own heads, the product what comes back
                saves = (*saves, mixed._replace(name=f"{mixed.name} of own heads"))
            statistics = () if shape.materialised else statistics
        if step.op in (StepOp.DELTA_RULE, StepOp.STATE_SPACE) and shape.exchanging > 1:
            saves = tuple(map(shape.repeated, saves))
        if step.op is StepOp.STATE_SPACE and shape.exchanging > 1:  # its gate and norm come after
            (mixed,) = step.gives
            saves = (*saves, mixed._replace(name=f"{mixed.name} before the gate"))
        if step.op is StepOp.CONVOLUTION and shape.exchanging > 1:
            found.update(_past(step, shape))
        found.update({value: shape.nbytes(value) for value in saves})
        found.update({value: shape.nbytes(value, STATISTIC) for value in statistics})
    return found


def _past(step: LayerStep, shape: BlockShape) -> Mapping[StepValue, int]:
    """What a rank has of the tokens before its own, where ranks split sequences."""
    value, (filters, *_) = step.gives[0], step.parameters
    sequences, tokens = shape.tokens // shape.sequence_length, filters.shape[1] - 1
    nbytes = sequences * tokens * value.columns(shape.tensor_parallel) * shape.element_size
    return {value._replace(name=f"tokens before {step.name}"): nbytes}


def block_saved_bytes(model: ModelSpec, shape: BlockShape) -> int:
    """Bytes of all saved values, with materialised scores and masks of dropout."""
    masks = sum(step.op is StepOp.SUM for step in model.steps("block")) if shape.dropout else 0
    mask = shape.nbytes(StepValue("mask", model.hidden, split=False), element_size=1)
    saved = sum(saved_values(model, shape).values())
    return saved + masks * mask + score_bytes(model, shape)
