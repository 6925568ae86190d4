"""The MLP of a block with experts, from the rows at their experts back to their tokens.

Its autograd functions save gate and up, and the activation only where nothing is recomputed. As in
layers/products.py, products may add weights' gradients to sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.experts import biases as expert_biases
from bigplan.runtime.experts.activations import Activation
from bigplan.runtime.experts.adapters import ExpertAdapters
from bigplan.runtime.experts.dispatch import Places
from bigplan.runtime.experts.expert_parallel import Dispatch
from bigplan.runtime.experts.mixture import (
    DOWN,
    DOWN_BIAS,
    GATE,
    GATE_BIAS,
    PLAIN,
    ROUTER,
    UP,
    UP_BIAS,
    Mixture,
    by_experts,
    by_matrix,
)
from bigplan.runtime.experts.own_scores import own_scores
from bigplan.runtime.experts.routed_rows import Passed, RoutedRows, sent
from bigplan.spec.expert_steps import EXPERT_SCALES, ROUTER_BIAS, SCORE_BIAS
from bigplan.spec.model import ModelSpec


class _Sent(NamedTuple):
    """How experts run, and what is no tensor, or trained by others, once tokens are at them."""

    mixture: Mixture
    dispatch: Dispatch
    adapters: ExpertAdapters | None  # of the last product
    shape: torch.Size  # of what the block's MLP reads and gives


def mlp(
    p: Mapping[str, Tensor],
    x: Tensor | None,
    normed: Tensor,
    model: ModelSpec,
    mixture: Mixture = PLAIN,
    by: Tensor | None = None,
) -> Tensor:
    """Add to x what the experts of `normed` give, both [b, s, h] or as tensor-parallel ranks.

    None: what they give alone, of which there is a norm. That reads it in its backward, too.
    `by`: what the router reads; None: as experts.
    """
    # Not `forget`: it holds what keeps the graph, which would then hold itself until a collection.
    activation = mixture.rows.activation(model.mlp, model.routed_by.weighs)
    entering = mixture.adapters(p, GATE), mixture.adapters(p, UP)
    passed = Passed(mixture._replace(forget=None, activation=activation), model, entering)
    router, score_bias, scores = p[ROUTER], p.get(SCORE_BIAS), None
    if by is not None:
        scores = own_scores(by, router, score_bias, mixture, model.routed_by)
    routing = (None, None) if by is not None else (router, score_bias)
    others = routing[1], p.get(EXPERT_SCALES), p.get(GATE_BIAS), p.get(UP_BIAS)
    matrices = routing[0], p.get(GATE), p[UP]
    routed = RoutedRows.apply(  # type: ignore[no-untyped-call]
        passed, mixture.forget, normed, p.get(ROUTER_BIAS), scores, *matrices, *others
    )
    gate, up, weights, by_token, dispatch, *places = routed
    there = _Sent(passed.mixture, dispatch, mixture.adapters(p, DOWN), normed.shape)
    last = p[DOWN], p.get(DOWN_BIAS), weights if by_token is None else by_token
    if mixture.gated:
        return _Gated.apply(there, x, gate, up, weights, *places, *last)  # type: ignore[no-any-return, no-untyped-call]
    inner = Weighted.apply(activation, gate, up, weights)  # type: ignore[no-untyped-call]
    return _Closing.apply(there, x, inner, *places, *last)  # type: ignore[no-any-return, no-untyped-call]


class Weighted(Function):
    """silu(gate) * up * weight of each row, or another activation; saves all that there are."""

    @staticmethod
    def forward(
        ctx: Any, activation: Activation, gate: Tensor | None, up: Tensor, weights: Tensor
    ) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate, up, weights)
        return activation.forward(gate, up, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        gate, up, weights = ctx.saved_tensors
        return None, *ctx.activation.backward(gate, up, weights, gradients[0])


class _Closing(Function):
    """x and for each token the sum of its experts' results, those of rows `inner` [rows, f]."""

    @staticmethod
    def forward(ctx: Any, passed: _Sent, x: Tensor | None, inner: Tensor, *given: Any) -> Tensor:
        *places, down, bias, own = given
        ctx.passed, last = passed, _Last(down, bias, None if bias is None else own)
        asked = not passed.mixture.frozen or passed.adapters is not None
        ctx.save_for_backward(inner if asked else None, *places, *last)
        return _added(passed, x, inner, Places(*places), last)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        inner, chosen, order, *last = ctx.saved_tensors
        (by_output,), places = gradients, Places(chosen, order)
        rows, by_inner, ends, biased = _returned(ctx.passed, by_output, places, _Last(*last))
        by_down = _by_down(ctx.passed.mixture, last[0], (inner, rows), ends)
        _by_adapters(ctx.passed, (inner, rows), ends)
        return (
            None,
            by_output if ctx.needs_input_grad[1] else None,
            by_inner,
            None,
            None,
            by_down,
            *biased,
        )


class _Gated(Function):
    """The same of the weighted activation, which is never kept, as in layers/products.py."""

    @staticmethod
    def forward(ctx: Any, passed: _Sent, x: Tensor | None, *given: Any) -> Tensor:
        gate, up, weights, *places, down, bias, own = given
        ctx.passed, last = passed, _Last(down, bias, None if bias is None else own)
        ctx.save_for_backward(gate, up, weights, *places, *last)
        if passed.mixture.unread:
            return torch.empty((), dtype=up.dtype, device=up.device).expand(passed.shape)
        inner = passed.mixture.activation.forward(gate, up, weights)
        return _added(passed, x, inner, Places(*places), last)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        gate, up, weights, chosen, order, *last = ctx.saved_tensors
        (by_output,), places = gradients, Places(chosen, order)
        rows, inner, ends, biased = _returned(ctx.passed, by_output, places, _Last(*last))
        by_factors = ctx.passed.mixture.activation.backward(gate, up, weights, inner)
        del gate, up  # which may have been computed again, and are as large
        by_down = _by_down(ctx.passed.mixture, last[0], (inner, rows), ends)
        _by_adapters(ctx.passed, (inner, rows), ends)
        return (
            None,
            by_output if ctx.needs_input_grad[1] else None,
            *by_factors,
            None,
            None,
            by_down,
            *biased,
        )


def _by_down(
    mixture: Mixture, down: Tensor, factors: tuple[Tensor, Tensor], ends: Tensor
) -> Tensor | None:
    """As by_experts of the last matrix: of rows before it [rows, f], and by rows behind it."""
    if mixture.frozen:
        return None
    inner, rows = factors
    return by_experts(mixture, (DOWN, down), (inner, mixture.grouped.read_again(rows, ends)), ends)


def _by_adapters(passed: _Sent, factors: tuple[Tensor, Tensor], ends: Tensor) -> None:
    """Add the gradients of the last product's adapters, of its input and of its rows' gradient."""
    if passed.adapters is not None:
        inner, rows = factors
        passed.adapters.add_gradients(rows, inner, ends, passed.mixture.rows.put)


class _Last(NamedTuple):
    """The last matrix of experts, and their last biases with a token's weights of these."""

    down: Tensor
    bias: Tensor | None
    weights: Tensor | None

    def of_all(self, mixture: Mixture, places: Places, dtype: torch.dtype) -> Tensor:
        """As expert_biases.weights_of_all."""
        assert self.bias is not None and self.weights is not None
        return expert_biases.weights_of_all(places, self.weights, dtype, mixture.ranks, self.bias)


def _added(passed: _Sent, x: Tensor | None, inner: Tensor, places: Places, last: _Last) -> Tensor:
    """x, if any, and the experts' results of rows `inner`, summed over all ranks' parts of them."""
    mixture, ends = passed.mixture, passed.dispatch.ends(places)
    grouped = mixture.grouped
    results = grouped.leaving(grouped.read(inner), last.down, ends)
    if passed.adapters is not None:
        passed.adapters.add_to(results, inner, ends)
    back = passed.dispatch.combined(mixture.rows, results, places)
    del results  # while their sums are on their way
    output = back()
    if last.bias is not None:
        output.addmm_(last.of_all(mixture, places, output.dtype), last.bias.T)
    added = mixture.ranks.sum(output)().view(passed.shape)
    return added if x is None else x + added


def _returned(
    passed: _Sent, by_output: Tensor, places: Places, last: _Last
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:
    """The gradients by experts' results and by the rows before the last product, and ends.

    Also those by last biases, and by the weights that these have.
    """
    mixture, dispatch, adapters, _ = passed
    ends = dispatch.ends(places)
    gathered = mixture.ranks.gather(by_output)().flatten(0, -2)
    rows = sent(dispatch, mixture.rows, dispatch.came(mixture.rows, gathered)(), *places)
    grouped = mixture.grouped
    by_inner = grouped.entering(grouped.read(rows), last.down, ends)
    if adapters is not None:
        adapters.add_by_input(by_inner, rows, ends)
    if last.bias is None:
        return rows, by_inner, ends, (None, None)
    by_weights = expert_biases.by_row(places, gathered @ last.bias, mixture.ranks)
    if mixture.frozen:
        return rows, by_inner, ends, (None, by_weights)
    weights = last.of_all(mixture, places, gathered.dtype)
    by_bias = by_matrix(mixture.sums, DOWN_BIAS, gathered, weights)
    return rows, by_inner, ends, (by_bias, by_weights)
