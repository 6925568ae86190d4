"""What blocks hand on beside the residual stream, in a plain loop: autograd adds gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.runtime.layers import blocks, inputs
from bigplan.runtime.mixers import positions
from bigplan.runtime.mixers.ways import PLAIN, Parameters, Ways
from bigplan.spec.carried import INPUTS, KEYS, OWN_INPUT, TABLES, VALUES, keepers
from bigplan.spec.layers import TABLE, first_block
from bigplan.spec.model import ModelSpec


@dataclass
class Handing:
    """Of one micro-batch, whose blocks come one after the other."""

    model: ModelSpec
    own: Tensor | None = None  # [blocks, b, s, width]
    kept: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32  # of keys and values

    @classmethod
    def begun(
        cls, model: ModelSpec, p: Parameters, rows: Tensor | None, x: Tensor, ways: Ways = PLAIN
    ) -> Handing:
        """By embedded tokens x [b, s, h] and the rows of blocks' tables [b, s, blocks * width]."""
        if rows is None:
            return cls(model)
        own = inputs.to_inputs(p, x, model, ways)
        inputs.add_tables(own, rows)
        return cls(model, own)

    def found(self, number: int) -> dict[str, Tensor]:
        """What block `number` finds beside its parameters."""
        found = {} if self.own is None else {OWN_INPUT: self.own[number]}
        if self.model.seen_by(self.model.block_kinds[number]).keys_given:
            kept = self.kept[self.model.local_blocks[number]]
            found |= zip((KEYS, VALUES), (one.to(self.dtype) for one in kept), strict=True)
        return found

    def ways(self, number: int, ways: Ways = PLAIN) -> Ways:
        """Those of block `number`, which may keep keys and values."""

        def hand_on(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            wide = keys.float(), values.float()  # as gradients by them are added up
            self.kept[self.model.local_blocks[number]], self.dtype = wide, keys.dtype
            return wide[0].to(keys.dtype), wide[1].to(keys.dtype)

        return ways._replace(hand_on=hand_on) if number in keepers(self.model) else ways


def tables_of(model: ModelSpec, layers: Sequence[Parameters]) -> Tensor | None:
    """All blocks' tables among the parameters of all layers, if the model has them."""
    return layers[model.layer_sequence().index(INPUTS)][TABLES] if model.block_inputs else None


def hidden_states(
    model: ModelSpec,
    layers: Sequence[Mapping[str, Tensor]],
    tokens: Tensor,
    bounds: Tensor | None = None,
) -> Tensor:
    """What the head is given [b, s, h], of parameters by layer; `bounds` of documents apart."""
    begins, dtype = None if bounds is None else bounds[:, 0], layers[0][TABLE].dtype
    x = blocks.embedding(layers[0], tokens, model, begins=begins)
    x = blocks.embedding_norm(layers[0], x, model)
    table = tables_of(model, layers)
    rows = None if table is None else F.embedding(tokens, table)
    handing = Handing.begun(model, layers[0], rows, x)
    own, start = model.attentions, first_block(model.layer_sequence())
    for number, (kind, attends) in enumerate(zip(model.block_kinds, own, strict=True)):
        seen = model.seen_by(kind)
        at = positions.position_tables(seen, tokens.shape[1], "cpu", dtype, attends=attends)
        found = {**layers[start + number], **handing.found(number)}
        x = blocks.block(found, x, seen, at._replace(bounds=bounds), handing.ways(number))
    return x
