"""Blocks' own inputs: what the embedding makes of a token, and rows of the blocks' tables.

The embedding keeps tokens alone, and its backward makes product and norm again: they are as wide as
all blocks' inputs together, 6 times the hidden state in Gemma 4 E2B.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.runtime.layers.carried import UnderWay
from bigplan.runtime.layers.kept import KeptActivations, differentiate
from bigplan.runtime.layers.leaves import leaf_of
from bigplan.runtime.layers.visit import Visit
from bigplan.runtime.mixers.norms import rms_normed
from bigplan.runtime.mixers.ways import PLAIN, Parameters, Ways
from bigplan.runtime.operators import RmsRule
from bigplan.spec.carried import INPUTS_NORM, TABLES, TO_INPUTS
from bigplan.spec.model import ModelSpec

MADE_OF = (f"{TO_INPUTS}.weight", f"{INPUTS_NORM}.weight")


def to_inputs(p: Parameters, x: Tensor, model: ModelSpec, ways: Ways = PLAIN) -> Tensor:
    """What embedded tokens x [b, s, h] add to blocks' own inputs, [blocks, b, s, width].

    A norm with an epsilon that is `hidden` times as large is that of a product divided by the root
    of `hidden`.
    """
    assert model.block_inputs is not None
    (made,) = ways.linears(p, (TO_INPUTS,), x)
    each = made.view(*x.shape[:2], model.layers, model.block_inputs.width)
    rule = RmsRule(model.norm_epsilon * model.hidden, model.norm_plus_one)
    normed = rms_normed(each, p[f"{INPUTS_NORM}.weight"], rule, ways.kernels)
    return normed.permute(2, 0, 1, 3).contiguous()


def add_tables(inputs: Tensor, rows: Tensor) -> None:
    """Make `inputs` [blocks, b, s, width] blocks' own, by rows [b, s, blocks * width] of tables."""
    blocks, *_, width = inputs.shape
    each = rows.view(*rows.shape[:2], blocks, width).permute(2, 0, 1, 3)
    inputs.add_(each, alpha=width**0.5).mul_(0.5**0.5)


def by_tables(gradient: Tensor) -> Tensor:
    """The gradient by add_tables's rows; over `gradient`, that by its first inputs."""
    gradient.mul_(0.5**0.5)
    rows: Tensor = gradient.permute(1, 2, 0, 3).flatten(2) * gradient.shape[-1] ** 0.5
    return rows


def gradients(
    p: Parameters, x: Tensor, by_made: Tensor, model: ModelSpec, ways: Ways = PLAIN
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Those of `to_inputs` by x and by its parameters, of that by what it made."""
    leaves = {name: leaf_of(p[name]) for name in MADE_OF}
    x = leaf_of(x)
    with torch.enable_grad():
        made = to_inputs(leaves, x, model, ways)
    by_x, *others = differentiate([made], [x, *leaves.values()], [by_made])
    return by_x, dict(zip(leaves, others, strict=True))


class Inputs:
    """The layer of all blocks' tables; the residual stream passes it as it is."""

    def __init__(self, under_way: UnderWay) -> None:
        self._under_way = under_way

    def forward(self, visit: Visit, kept: KeptActivations) -> Tensor:
        """Keeps nothing: tokens are carried."""
        return self.evaluate(visit)

    @torch.no_grad()
    def evaluate(self, visit: Visit) -> Tensor:
        """Make blocks' inputs of what the embedding has made."""
        inputs, tokens = self._begun(visit)
        if visit.by_rows:
            rows = visit.embedded_rows()
        else:
            rows = F.embedding(tokens, visit.parameters()[TABLES])
        add_tables(inputs, rows)
        return visit.hidden()

    def _begun(self, visit: Visit) -> tuple[Tensor, Tensor]:
        """Inputs, or the gradients in their place, [blocks, b, s, width], and tokens [b, s]."""
        carried = self._under_way.carried[visit.action.micro_batch]
        assert carried.tokens is not None, "the embedding is another stage's"
        return carried.own(), carried.tokens

    @torch.no_grad()
    def backward(self, visit: Visit, kept: KeptActivations) -> Tensor:
        """Adds rows to the tables' sum, or leaves them for that in host memory."""
        gradient, tokens = self._begun(visit)
        rows = by_tables(gradient)
        if visit.by_rows:
            visit.send_rows_home(rows, tokens)
        else:
            visit.open(kept.sums)
            kept.sums.add_rows(TABLES, tokens.flatten(), rows.flatten(0, 1))
            kept.sums.close()
        return visit.gradient()
