"""Tokens at their experts: the router's choice, the rows that come, and their gate and up.

As an autograd function it saves what bigplan/spec/layers.py says: the MLP's input, the routers'
scores, and two numbers and a weight for each row. Tensor-parallel ranks gather all tokens before
the router, all choose alike, and have a part of each expert. Expert-parallel ranks have some
experts each (expert_parallel.py): gate, up and weights are of the tokens that come to a rank, which
are saved, too, because it takes an exchange to have them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function

from bigplan.runtime.experts import biases as expert_biases
from bigplan.runtime.experts import dispatch as experts
from bigplan.runtime.experts import expert_scales
from bigplan.runtime.experts.adapters import ExpertAdapters
from bigplan.runtime.experts.dispatch import Places, RowOperators
from bigplan.runtime.experts.expert_parallel import Dispatch
from bigplan.runtime.experts.grouped import Grouped
from bigplan.runtime.experts.mixture import (
    GATE,
    GATE_BIAS,
    ROUTER,
    UP,
    UP_BIAS,
    Entering,
    ForgetRouted,
    Matrix,
    Mixture,
    Routed,
    by_experts,
    by_matrix,
)
from bigplan.spec.model import ModelSpec


class Passed(NamedTuple):
    """What is no tensor, or trained by others, as functions pass it on."""

    mixture: Mixture
    model: ModelSpec
    adapters: Entering


def came(dispatch: Dispatch, operators: RowOperators, x: Tensor) -> Tensor:
    """The tokens [., h] that experts get, of all tokens x [..., h]."""
    return dispatch.came(operators, x.flatten(0, -2))()


def sent(dispatch: Dispatch, operators: RowOperators, tokens: Tensor, *places: Tensor) -> Tensor:
    """The rows [rows, h] of tokens [..., h] that came."""
    return operators.sent(tokens.flatten(0, -2), dispatch.here(Places(*places)))


def weights(dispatch: Dispatch, values: Tensor, *places: Tensor) -> Tensor:
    """The weights of rows of tokens that came."""
    return dispatch.weights(values, Places(*places))


def read(
    dispatch: Dispatch, operators: RowOperators, grouped: Grouped, tokens: Tensor, *places: Tensor
) -> Tensor:
    """The rows of tokens [..., h] that came, as first products read them."""
    return sent(dispatch, operators, grouped.read(tokens.flatten(0, -2)), *places)


def given(
    dispatch: Dispatch,
    grouped: Grouped,
    adapters: ExpertAdapters | None,
    rows: Tensor,
    weight: Tensor,
    *others: Tensor,
) -> Tensor:
    """What a first matrix of experts [f * experts, h] makes of rows that are read: [rows, f].

    `others`: the rows' places, and all experts' biases where they have some.
    """
    chosen, order, *biases = others
    places = Places(chosen, order)
    ends = dispatch.ends(places)
    found = grouped.entering(rows, weight, ends)
    for bias in biases:
        expert_biases.add_biases_(found, unit_vectors(dispatch, places, bias), bias)
    if adapters is not None:
        adapters.add_to(found, rows, ends)
    return found


def unit_vectors(dispatch: Dispatch, places: Places, bias: Tensor) -> Tensor:
    """Of the rows that this rank's experts get, among all experts that `bias` is of."""
    here = dispatch.here(places)
    return expert_biases.unit_vectors(here, bias.shape[1], bias.dtype, dispatch.first)


class RoutedRows(Function):
    """Gate and up of the rows of x, their weights, their ways and their places.

    Gate is None where experts have no such matrix.
    """

    @staticmethod
    def forward(
        ctx: Any,
        passed: Passed,
        forget: ForgetRouted | None,
        x: Tensor,
        bias: Tensor | None,
        own_scores: Tensor | None,
        *weights: Any,
    ) -> tuple[Tensor | Dispatch | None, ...]:
        ctx.set_materialize_grads(False)
        mixture, model, adapters = passed
        router, gate, up, score_bias, scales, *biases = weights
        whole, scores = mixture.ranks.gather(x)().flatten(0, -2), own_scores
        if scores is None:
            scores = experts.router_scores(whole, router, model.routed_by, score_bias)
        by_token, places, unscaled = _chosen(model, scores, bias, scales)
        ctx.mark_non_differentiable(*places)
        dispatch = mixture.spread.dispatch(places, model.experts)
        ctx.passed, ctx.dispatch, ctx.shape, ctx.dtype = passed, dispatch, x.shape, x.dtype
        coming = dispatch.came(mixture.rows, whole)
        by_row, tokens = dispatch.weights(by_token, places), coming()
        del coming
        asked = not mixture.frozen or any(adapters)
        kept = x if asked else None, tokens if dispatch.away else None
        weighed = scales, unscaled
        ctx.save_for_backward(*kept, scores, *places, router, gate, up, biases[0], *weighed)
        rows = read(dispatch, mixture.rows, mixture.grouped, tokens, *places)
        matrices: tuple[Matrix | None, Matrix] = (None if gate is None else (gate,)), (up,)
        if biases[0] is not None:
            matrices = (gate, biases[0]), (up, biases[1])

        def entered(own: ExpertAdapters | None, matrix: Matrix) -> Tensor:
            return given(dispatch, mixture.grouped, own, rows, matrix[0], *places, *matrix[1:])

        opened = None if matrices[0] is None else entered(adapters[0], matrices[0])
        beside = entered(adapters[1], matrices[1])
        if forget is not None:
            routed = Routed(tokens, opened, beside, by_row, by_token, places, dispatch, adapters)
            forget(x, matrices, routed)
        # Last biases are weighted where their tokens are.
        own = by_token if dispatch.away and model.mlp_bias else None
        return (opened, beside, by_row, own, dispatch, *places)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, kept, scores, chosen, order, router, gate, up, bias, *weighed = ctx.saved_tensors
        mixture, model, _ = ctx.passed
        dispatch, places = ctx.dispatch, Places(chosen, order)
        ends, asked = dispatch.ends(places), x is not None
        # Frozen products need no tokens, and their adapters those that came.
        again = None if x is None or (mixture.frozen and dispatch.away) else mixture.ranks.gather(x)
        del x
        by_gate, by_up, by_weights, by_own, *_ = gradients
        found = _by_rows(ctx.passed, (by_gate, by_up), (gate, up), ends)
        by_input = dispatch.combined(mixture.rows, found[0], places, *found[1:])
        del found
        by_token = dispatch.returned(by_weights, places)
        by_token = by_token if by_own is None else by_token + by_own
        by_scales, by_token = _unscaled(by_token, places, *weighed)
        by_scores = _by_scores(ctx.passed, scores, places, by_token)
        by_given = None if router is not None else by_scores.to(scores.dtype)
        by_scores = experts.by_product(by_scores, model.routed_by).to(ctx.dtype)

        def by_factors(tokens: Tensor) -> list[Tensor | None]:
            rows = sent(dispatch, mixture.rows, tokens, *places)
            if mixture.frozen:
                _by_adapters(ctx.passed, (by_gate, by_up), rows, ends)
                return [None, None]
            return _by_factors(mixture, ((gate, by_gate), (up, by_up)), rows, ends)

        # What other ranks' experts give comes beside these products.
        by_matrices = by_factors(kept) if dispatch.away and asked else [None, None]
        by_tokens = by_input()
        if router is not None:
            by_tokens.addmm_(by_scores, router)
        summed = mixture.ranks.sum(by_tokens)
        if again is None:
            return None, None, summed().view(ctx.shape), None, by_given, *[None] * 7
        whole = again().flatten(0, -2)
        if mixture.frozen:
            by_factors(whole)
            return None, None, summed().view(ctx.shape), None, by_given, *[None] * 7
        by_router = None
        if router is not None:
            by_router = by_matrix(mixture.sums, ROUTER, by_scores, whole)
        if kept is None:
            by_matrices = by_factors(whole)
        by_score_bias = by_scores.sum(0) if ctx.needs_input_grad[8] else None
        by_biases: list[Tensor | None] = [None, None]
        if bias is not None:
            by_biases = _by_biases(mixture, (by_gate, by_up), unit_vectors(dispatch, places, bias))
        by_routing = by_score_bias, by_scales
        by_x = summed().view(ctx.shape)
        return None, None, by_x, None, by_given, by_router, *by_matrices, *by_routing, *by_biases


def _chosen(
    model: ModelSpec, scores: Tensor, bias: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Places, Tensor | None]:
    """Weights of a token's experts, where their rows are, and weights before `scales`, if any."""
    weights, places = experts.route(
        scores,
        model.experts_per_token,
        normalised=model.router_normalised,
        routing=model.weighted_by,
        bias=bias,
    )
    if scales is None:
        return weights, places, None
    return expert_scales.scaled(weights, places, scales), places, weights


def _by_biases(
    mixture: Mixture, by_outputs: tuple[Tensor, Tensor], vectors: Tensor
) -> list[Tensor | None]:
    """The gradients by gate's and up's biases; `vectors`: which expert each row is of."""
    named = zip((GATE_BIAS, UP_BIAS), by_outputs, strict=True)
    return [by_matrix(mixture.sums, name, one, vectors) for name, one in named]


def _by_rows(
    passed: Passed, by_outputs: Sequence[Tensor], matrices: Sequence[Tensor | None], ends: Tensor
) -> list[Tensor]:
    """Gradients by the rows that gate and up read, of those by what they give."""
    grouped, found = passed.mixture.grouped, []
    for own, by_output, matrix in zip(passed.adapters, by_outputs, matrices, strict=True):
        if matrix is None:
            continue
        found.append(grouped.leaving(grouped.read(by_output), matrix, ends))
        if own is not None:
            own.add_by_input(found[-1], by_output, ends)
    return found


def _by_scores(passed: Passed, scores: Tensor, places: Places, by_token: Tensor) -> Tensor:
    """The gradient by scores, fp32, of that by weights of this rank's tokens' rows."""
    mixture, model, _ = passed
    return experts.by_scores(
        scores,
        places,
        by_token,
        _balance(mixture, model, places),
        normalised=model.router_normalised,
        routing=model.weighted_by,
    )


def _unscaled(
    by_scaled: Tensor, places: Places, scales: Tensor | None, weights: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The gradients by numbers of experts, where there are some, and by weights before them."""
    if scales is None or weights is None:
        return None, by_scaled
    by_scales = expert_scales.by_scales(by_scaled, weights, places, scales)
    return by_scales, expert_scales.scaled(by_scaled, places, scales)


def _by_adapters(
    passed: Passed, by_outputs: tuple[Tensor, Tensor], rows: Tensor, ends: Tensor
) -> None:
    """Add the gradients of gate's and of up's adapters, of their input [rows, h]."""
    for own, by_output in zip(passed.adapters, by_outputs, strict=True):
        if own is not None:
            own.add_gradients(by_output, rows, ends, passed.mixture.rows.put)


def _by_factors(
    mixture: Mixture, factors: Sequence[tuple[Tensor | None, Tensor]], rows: Tensor, ends: Tensor
) -> list[Tensor | None]:
    """The gradients by gate and up of rows [rows, h], of each and the gradient by what it gives."""
    read = mixture.grouped.read_again(rows, ends)
    return [
        None if matrix is None else by_experts(mixture, (name, matrix), (gradient, read), ends)
        for name, (matrix, gradient) in zip((GATE, UP), factors, strict=True)
    ]


def _balance(mixture: Mixture, model: ModelSpec, places: Places) -> Tensor | None:
    if mixture.balance is None:
        return None
    return experts.balance_gradient(places, model.experts, mixture.balance())
