"""The MLP of a block with experts, as autograd functions.

They save what bigplan/spec/layers.py says: the MLP's input, the routers' scores, two numbers and a
weight for each row, gate and up, and the activation only where nothing is recomputed. As in
products.py, products may add weights' gradients to sums. Tensor-parallel ranks gather all tokens
before the router, all choose alike, and have a part of each expert. Expert-parallel ranks have some
experts each (expert_parallel.py): gate, up and weights are of the tokens that come to a rank, which
are saved, too, because it takes an exchange to have them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime import expert_biases, experts
from bigplan.runtime.expert_adapters import ExpertAdapters, GroupedSums
from bigplan.runtime.expert_parallel import ALL_HERE, Dispatch, ExpertParallel
from bigplan.runtime.experts import Places, RowOperators
from bigplan.runtime.grouped import EXPERTS_AS_STORED, Factors, Grouped
from bigplan.runtime.tensor_parallel import ONE, TensorParallel
from bigplan.spec.layers import ROUTER_BIAS, SCORE_BIAS
from bigplan.spec.model import ModelSpec

ROUTER = "router.weight"
GATE, UP, DOWN = (f"experts.{name}_proj.weight" for name in ("gate", "up", "down"))
GATE_BIAS, UP_BIAS, DOWN_BIAS = (f"experts.{name}_proj.bias" for name in ("gate", "up", "down"))
EXPERTS = (ROUTER, GATE, UP, DOWN, GATE_BIAS, UP_BIAS, DOWN_BIAS)


Entering = tuple[ExpertAdapters | None, ExpertAdapters | None]  # of gate and of up


class Routed(NamedTuple):
    """What experts make of the rows that they are sent, and where the rows are."""

    came: Tensor  # tokens [., h]
    gate: Tensor  # [rows, f]
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
ForgetRouted = Callable[[Tensor, tuple[Matrix, Matrix], Routed], None]


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
    frozen: bool = False  # nobody asks for weights' gradients, nor keeps what they would be made of
    grouped: Grouped = EXPERTS_AS_STORED  # how rows are multiplied
    spread: ExpertParallel = ALL_HERE  # who has which experts
    scale: float = 0.0  # of adapters, where experts have some

    def adapters(self, p: Mapping[str, Tensor], matrix: str) -> ExpertAdapters | None:
        """Those of one of experts' matrices."""
        return ExpertAdapters.find(p, matrix, self.scale, self.sums)


PLAIN = Mixture()


class _Passed(NamedTuple):
    """What is no tensor, or trained by others, as functions pass it on."""

    mixture: Mixture
    model: ModelSpec
    adapters: Entering


class _Sent(NamedTuple):
    """The same, once tokens are at their experts."""

    mixture: Mixture
    dispatch: Dispatch
    adapters: ExpertAdapters | None  # of the last product


def mlp(
    p: Mapping[str, Tensor], x: Tensor, normed: Tensor, model: ModelSpec, mixture: Mixture = PLAIN
) -> Tensor:
    """Add to x what the experts of `normed` give, both [b, s, h] or as tensor-parallel ranks."""
    # Not `forget`: it holds what keeps the graph, which would then hold itself until a collection.
    rows = mixture.rows.of_clamped if model.mlp == "clamped_swiglu" else mixture.rows
    entering = mixture.adapters(p, GATE), mixture.adapters(p, UP)
    passed = _Passed(mixture._replace(forget=None, rows=rows), model, entering)
    biases = (p.get(name) for name in (SCORE_BIAS, GATE_BIAS, UP_BIAS))
    routed = _Routed.apply(  # type: ignore[no-untyped-call]
        passed, mixture.forget, normed, p.get(ROUTER_BIAS), p[ROUTER], p[GATE], p[UP], *biases
    )
    gate, up, weights, by_token, dispatch, *places = routed
    there = _Sent(passed.mixture, dispatch, mixture.adapters(p, DOWN))
    last = p[DOWN], p.get(DOWN_BIAS), weights if by_token is None else by_token
    if mixture.gated:
        return _Gated.apply(there, x, gate, up, weights, *places, *last)  # type: ignore[no-any-return, no-untyped-call]
    inner = Weighted.apply(rows, gate, up, weights)  # type: ignore[no-untyped-call]
    return _Closing.apply(there, x, inner, *places, *last)  # type: ignore[no-any-return, no-untyped-call]


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
        expert_biases.add_biases_(found, _unit_vectors(dispatch, places, bias), bias)
    if adapters is not None:
        adapters.add_to(found, rows, ends)
    return found


def _unit_vectors(dispatch: Dispatch, places: Places, bias: Tensor) -> Tensor:
    """Of the rows that this rank's experts get, among all experts that `bias` is of."""
    here = dispatch.here(places)
    return expert_biases.unit_vectors(here, bias.shape[1], bias.dtype, dispatch.first)


class _Routed(Function):
    """Gate and up of the rows of x, their weights, their ways and their places."""

    @staticmethod
    def forward(
        ctx: Any,
        passed: _Passed,
        forget: ForgetRouted | None,
        x: Tensor,
        bias: Tensor | None,
        *weights: Any,
    ) -> tuple[Tensor | Dispatch | None, ...]:
        ctx.set_materialize_grads(False)
        mixture, model, adapters = passed
        router, gate, up, score_bias, *biases = weights
        whole = mixture.ranks.gather(x)().flatten(0, -2)
        scores = experts.router_scores(whole, router, model.routed_by, score_bias)
        by_token, places = experts.route(
            scores,
            model.experts_per_token,
            normalised=model.router_normalised,
            routing=model.weighted_by,
            bias=bias,
        )
        ctx.mark_non_differentiable(*places)
        dispatch = mixture.spread.dispatch(places, model.experts)
        ctx.passed, ctx.dispatch, ctx.shape = passed, dispatch, x.shape
        coming = dispatch.came(mixture.rows, whole)
        by_row, tokens = dispatch.weights(by_token, places), coming()
        del coming
        asked = not mixture.frozen or any(adapters)
        kept = x if asked else None, tokens if dispatch.away else None
        ctx.save_for_backward(*kept, scores, *places, router, gate, up, biases[0])
        rows = read(dispatch, mixture.rows, mixture.grouped, tokens, *places)
        matrices = ((gate,), (up,)) if biases[0] is None else ((gate, biases[0]), (up, biases[1]))
        opened, beside = (
            given(dispatch, mixture.grouped, own, rows, weight, *places, *bias)
            for own, (weight, *bias) in zip(adapters, matrices, strict=True)
        )
        if forget is not None:
            routed = Routed(tokens, opened, beside, by_row, by_token, places, dispatch, adapters)
            forget(x, matrices, routed)
        # Last biases are weighted where their tokens are.
        own = by_token if dispatch.away and model.mlp_bias else None
        return (opened, beside, by_row, own, dispatch, *places)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, kept, scores, chosen, order, router, gate, up, bias = ctx.saved_tensors
        mixture, model, adapters = ctx.passed
        dispatch, places = ctx.dispatch, Places(chosen, order)
        again, ends = None if x is None else mixture.ranks.gather(x), dispatch.ends(places)
        del x
        by_gate, by_up, by_weights, by_own, *_ = gradients
        grouped = mixture.grouped
        rows = grouped.leaving(grouped.read(by_gate), gate, ends)
        beside = grouped.leaving(grouped.read(by_up), up, ends)
        for own, by_output, total in zip(adapters, (by_gate, by_up), (rows, beside), strict=True):
            if own is not None:
                own.add_by_input(total, by_output, ends)
        by_input = dispatch.combined(mixture.rows, rows, places, beside)
        del rows, beside
        by_token = dispatch.returned(by_weights, places)
        by_scores = experts.by_scores(
            scores,
            places,
            by_token if by_own is None else by_token + by_own,
            _balance(mixture, model, places),
            normalised=model.router_normalised,
            routing=model.weighted_by,
        ).to(router.dtype)

        def by_factors(tokens: Tensor) -> list[Tensor | None]:
            if mixture.frozen:
                return [None, None]
            rows = grouped.read_again(sent(dispatch, mixture.rows, tokens, *places), ends)
            named = ((GATE, gate), by_gate), ((UP, up), by_up)
            return [_by_experts(mixture, one, (by, rows), ends) for one, by in named]

        # What other ranks' experts give comes beside these products.
        by_matrices = [None, None] if kept is None or mixture.frozen else by_factors(kept)
        summed = mixture.ranks.sum(by_input().addmm_(by_scores, router))
        if again is None:
            return None, None, summed().view(ctx.shape), *[None] * 7
        whole = again().flatten(0, -2)
        if mixture.frozen:
            rows = sent(dispatch, mixture.rows, whole, *places)
            for own, by_output in zip(adapters, (by_gate, by_up), strict=True):
                if own is not None:
                    own.add_gradients(by_output, rows, ends, mixture.rows.put)
            return None, None, summed().view(ctx.shape), *[None] * 7
        by_router = _by_router(mixture.sums, by_scores, whole)
        if kept is None:
            by_matrices = by_factors(whole)
        by_biases = [by_scores.sum(0) if ctx.needs_input_grad[7] else None, None, None]
        if bias is not None:
            vectors = _unit_vectors(dispatch, places, bias)
            named = (GATE_BIAS, by_gate), (UP_BIAS, by_up)
            by_biases[1:] = [_by_matrix(mixture.sums, name, one, vectors) for name, one in named]
        return None, None, summed().view(ctx.shape), None, by_router, *by_matrices, *by_biases


def _balance(mixture: Mixture, model: ModelSpec, places: Places) -> Tensor | None:
    if mixture.balance is None:
        return None
    return experts.balance_gradient(places, model.experts, mixture.balance())


def _by_router(sums: GradientSums | None, by_scores: Tensor, x: Tensor) -> Tensor | None:
    """The router's gradient for autograd, where no sum gets it."""
    return _by_matrix(sums, ROUTER, by_scores, x)


def _by_matrix(sums: GradientSums | None, name: str, gradient: Tensor, x: Tensor) -> Tensor | None:
    """gradient^T x, for autograd where no sum gets it."""
    if sums is None:
        return gradient.T @ x
    sums.add_product(name, gradient, x)
    return None


def _by_experts(
    mixture: Mixture, named: tuple[str, Tensor], factors: Factors, ends: Tensor
) -> Tensor | None:
    """The gradient of experts' matrix [f * experts, h] of that name, as _by_router."""
    name, weight = named
    add = partial(mixture.grouped.add, factors=factors, ends=ends, by=mixture.rows.put)
    if mixture.sums is not None:
        mixture.sums.add_by(name, add)
        return None
    total = torch.empty_like(weight)
    add(total, fresh=True)
    return total


def _by_down(
    mixture: Mixture, down: Tensor, factors: tuple[Tensor, Tensor], ends: Tensor
) -> Tensor | None:
    """The same of the last matrix: of rows before it [rows, f], and gradients of rows behind it."""
    if mixture.frozen:
        return None
    inner, rows = factors
    return _by_experts(mixture, (DOWN, down), (inner, mixture.grouped.read_again(rows, ends)), ends)


class Weighted(Function):
    """silu(gate) * up * weight of each row; saves all three."""

    @staticmethod
    def forward(
        ctx: Any, operators: RowOperators, gate: Tensor, up: Tensor, weights: Tensor
    ) -> Tensor:
        ctx.operators = operators
        ctx.save_for_backward(gate, up, weights)
        return operators.weighted(gate, up, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        gate, up, weights = ctx.saved_tensors
        return None, *ctx.operators.weighted_backward(gate, up, weights, gradients[0])


class _Closing(Function):
    """x and for each token the sum of its experts' results, those of rows `inner` [rows, f]."""

    @staticmethod
    def forward(ctx: Any, passed: _Sent, x: Tensor, inner: Tensor, *given: Any) -> Tensor:
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
        return None, by_output, by_inner, None, None, by_down, *biased


class _Gated(Function):
    """The same of the weighted activation, which is never kept, as in products.py."""

    @staticmethod
    def forward(ctx: Any, passed: _Sent, x: Tensor, *given: Any) -> Tensor:
        gate, up, weights, *places, down, bias, own = given
        ctx.passed, last = passed, _Last(down, bias, None if bias is None else own)
        ctx.save_for_backward(gate, up, weights, *places, *last)
        if passed.mixture.unread:
            return x.new_empty(()).expand_as(x)
        inner = passed.mixture.rows.weighted(gate, up, weights)
        return _added(passed, x, inner, Places(*places), last)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        gate, up, weights, chosen, order, *last = ctx.saved_tensors
        (by_output,), places = gradients, Places(chosen, order)
        rows, inner, ends, biased = _returned(ctx.passed, by_output, places, _Last(*last))
        by_factors = ctx.passed.mixture.rows.weighted_backward(gate, up, weights, inner)
        del gate, up  # which may have been computed again, and are as large
        by_down = _by_down(ctx.passed.mixture, last[0], (inner, rows), ends)
        _by_adapters(ctx.passed, (inner, rows), ends)
        return None, by_output, *by_factors, None, None, by_down, *biased


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


def _added(passed: _Sent, x: Tensor, inner: Tensor, places: Places, last: _Last) -> Tensor:
    """x, and the experts' results of rows `inner`, summed over all ranks' parts of them."""
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
    return x + mixture.ranks.sum(output)().view(x.shape)


def _returned(
    passed: _Sent, by_output: Tensor, places: Places, last: _Last
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:
    """The gradients by experts' results and by the rows before the last product, and ends.

    Also those by last biases, and by the weights that these have.
    """
    mixture, dispatch, adapters = passed
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
    by_bias = _by_matrix(mixture.sums, DOWN_BIAS, gathered, weights)
    return rows, by_inner, ends, (by_bias, by_weights)
