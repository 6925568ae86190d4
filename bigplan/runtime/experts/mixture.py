"""How a block runs its experts, and who gets the gradients of their matrices.

The MLP itself is in routed_rows.py, as far as the rows at their experts, and in mlp.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts.activations import Activation, plain_activation
from bigplan.runtime.experts.adapters import ExpertAdapters, GroupedSums
from bigplan.runtime.experts.dispatch import Places, RowOperators
from bigplan.runtime.experts.expert_parallel import ALL_HERE, Dispatch, ExpertParallel
from bigplan.runtime.experts.grouped import EXPERTS_AS_STORED, Factors, Grouped
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel

ROUTER = "router.weight"
GATE, UP, DOWN = (f"experts.{name}_proj.weight" for name in ("gate", "up", "down"))
GATE_BIAS, UP_BIAS, DOWN_BIAS = (f"experts.{name}_proj.bias" for name in ("gate", "up", "down"))
EXPERTS = (ROUTER, GATE, UP, DOWN, GATE_BIAS, UP_BIAS, DOWN_BIAS)

Entering = tuple[ExpertAdapters | None, ExpertAdapters | None]  # of gate and of up


class Routed(NamedTuple):
    """What experts make of the rows that they are sent, and where the rows are."""

    came: Tensor  # tokens [., h]
    gate: Tensor | None  # [rows, f]; None: experts have none
    up: Tensor  # [rows, f]
    weights: Tensor  # fp32 [rows]
    by_token: Tensor  # fp32 [tokens * k]: weights of this rank's tokens' rows
    places: Places
    dispatch: Dispatch
    adapters: Entering = (None, None)


class GradientSums(GroupedSums, Protocol):
    """Who adds up weights' gradients, by the parameter's name: products.Sums."""

    def add_product(self, name: str, gradient: Tensor, x: Tensor) -> None:
        """Add gradient^T x."""


Matrix = tuple[Tensor, ...]  # of experts, and their biases where they have some
# Told what gives tokens, gate and up again: the MLP's input, and gate's and up's matrices.
ForgetRouted = Callable[[Tensor, tuple[Matrix | None, Matrix], Routed], None]


class Mixture(NamedTuple):
    """How a block runs its experts."""

    ranks: TensorParallel = ONE
    sums: GradientSums | None = None  # who gets weights' gradients; None: autograd
    # What the balance of experts weighs in the gradients of a pass; None: nothing.
    balance: Callable[[], float] | None = None
    gated: bool = False  # the activation is not kept
    unread: bool = False  # for the backward alone: the output is not computed
    forget: ForgetRouted | None = None  # None: gate and up are kept
    rows: RowOperators = experts.RowOperators()
    activation: Activation = plain_activation("swiglu", "outputs")
    frozen: bool = False  # nobody asks for weights' gradients, nor keeps what they would be made of
    grouped: Grouped = EXPERTS_AS_STORED  # how rows are multiplied
    spread: ExpertParallel = ALL_HERE  # who has which experts
    scale: float = 0.0  # of adapters, where experts have some

    def adapters(self, p: Mapping[str, Tensor], matrix: str) -> ExpertAdapters | None:
        """Those of one of experts' matrices."""
        return ExpertAdapters.find(p, matrix, self.scale, self.sums)


PLAIN = Mixture()


def by_matrix(sums: GradientSums | None, name: str, gradient: Tensor, x: Tensor) -> Tensor | None:
    """gradient^T x, for autograd where no sum gets it."""
    if sums is None:
        return gradient.T @ x
    sums.add_product(name, gradient, x)
    return None


def by_experts(
    mixture: Mixture, named: tuple[str, Tensor], factors: Factors, ends: Tensor
) -> Tensor | None:
    """The gradient of experts' matrix [f * experts, h] of that name, as by_matrix."""
    name, weight = named
    add = partial(mixture.grouped.add, factors=factors, ends=ends, by=mixture.rows.put)
    if mixture.sums is not None:
        mixture.sums.add_by(name, add)
        return None
    total = torch.empty_like(weight)
    add(total, fresh=True)
    return total
