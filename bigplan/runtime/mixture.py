"""The MLP of a block with experts, as autograd functions.

They save what bigplan/spec/layers.py says: the MLP's input, the routers' scores, two numbers and a
weight for each row, gate and up, and the activation only where nothing is recomputed. As in
products.py, products may add weights' gradients to sums. Tensor-parallel ranks gather all tokens
before the router, all choose alike, and have a part of each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from bigplan.runtime import expert_biases, experts
from bigplan.runtime.experts import Places, Put, RowOperators
from bigplan.runtime.matrices import Open, as_stored
from bigplan.runtime.tensor_parallel import ONE, TensorParallel
from bigplan.spec.layers import ROUTER_BIAS, SCORE_BIAS
from bigplan.spec.model import ModelSpec

ROUTER = "router.weight"
GATE, UP, DOWN = (f"experts.{name}_proj.weight" for name in ("gate", "up", "down"))
GATE_BIAS, UP_BIAS, DOWN_BIAS = (f"experts.{name}_proj.bias" for name in ("gate", "up", "down"))
EXPERTS = (ROUTER, GATE, UP, DOWN, GATE_BIAS, UP_BIAS, DOWN_BIAS)


class Routed(NamedTuple):
    """What experts make of the rows that they are sent, and where the rows are."""

    gate: Tensor  # [rows, f]
    up: Tensor  # [rows, f]
    weights: Tensor  # fp32 [rows]
    places: Places
    experts: int


class GradientSums(Protocol):
    """Who adds up weights' gradients, by the parameter's name: products.Sums."""

    def add_product(self, name: str, gradient: Tensor, x: Tensor) -> None:
        """Add gradient^T x."""

    def add_grouped(self, name: str, factors: tuple[Tensor, Tensor], ends: Tensor, by: Put) -> None:
        """Add each expert's gradient^T rows, its factors."""


# Told what gives gate and up again: the MLP's input, the parameters and the places of rows.
ForgetRouted = Callable[[Mapping[str, Tensor], Tensor, Routed], None]


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
    open: Open = as_stored  # of experts' matrices


PLAIN = Mixture()


class _Passed(NamedTuple):
    """What is no tensor, as functions pass it on."""

    mixture: Mixture
    model: ModelSpec


def mlp(
    p: Mapping[str, Tensor], x: Tensor, normed: Tensor, model: ModelSpec, mixture: Mixture = PLAIN
) -> Tensor:
    """Add to x what the experts of `normed` give, both [b, s, h] or as tensor-parallel ranks."""
    # Not `forget`: it holds what keeps the graph, which would then hold itself until a collection.
    passed = _Passed(mixture._replace(forget=None), model)
    if model.mlp == "clamped_swiglu":
        passed = passed._replace(mixture=passed.mixture._replace(rows=mixture.rows.of_clamped))
    biases = (p.get(name) for name in (SCORE_BIAS, GATE_BIAS, UP_BIAS))
    weights = p[ROUTER], p[GATE], p[UP]
    outputs = _Routed.apply(passed, normed, p.get(ROUTER_BIAS), *weights, *biases)  # type: ignore[no-untyped-call]
    gate, up, weights, *places = outputs
    routed = Routed(gate, up, weights, Places(*places), model.experts)
    if mixture.forget is not None:
        mixture.forget(p, normed, routed)
    last = *places, p[DOWN], p.get(DOWN_BIAS)
    if mixture.gated:
        return _Gated.apply(passed, x, gate, up, weights, *last)  # type: ignore[no-any-return, no-untyped-call]
    inner = Weighted.apply(passed.mixture.rows, gate, up, weights)  # type: ignore[no-untyped-call]
    return _Closing.apply(passed, x, inner, weights, *last)  # type: ignore[no-any-return, no-untyped-call]


def sent(operators: RowOperators, x: Tensor, *places: Tensor) -> Tensor:
    """The rows [rows, h] of all tokens x [..., h]."""
    return operators.sent(x.flatten(0, -2), Places(*places))


def given(count: int, opened: Open, rows: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
    """What the first matrix of `count` experts [f * count, h] makes of their rows: [rows, f].

    `others`: the rows' places, and the experts' biases [f, count] where they have some.
    """
    chosen, order, *biases = others
    places = Places(chosen, order)
    found = experts.grouped(rows, experts.entering(opened(weight), count), places.ends(count))
    for bias in biases:
        vectors = expert_biases.unit_vectors(places, count, rows.dtype)
        expert_biases.add_biases_(found, vectors, bias)
    return found


class _Routed(Function):
    """Gate and up of the rows of x, their weights, and their places."""

    @staticmethod
    def forward(
        ctx: Any, passed: _Passed, x: Tensor, bias: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        (mixture, model), (router, gate, up, score_bias, *biases) = passed, weights
        whole = mixture.ranks.gather(x)().flatten(0, -2)
        scores = experts.router_scores(whole, router, model.routed_by, score_bias)
        by_row, places = experts.route(
            scores,
            model.experts_per_token,
            normalised=model.router_normalised,
            routing=model.routed_by,
            bias=bias,
        )
        ctx.mark_non_differentiable(*places)
        ctx.passed, ctx.shape = passed, x.shape
        ctx.save_for_backward(None if mixture.frozen else x, scores, *places, router, gate, up)
        rows = mixture.rows.sent(whole, places)
        given_by = (
            given(model.experts, mixture.open, rows, weight, *places, *own)
            for weight, *own in zip((gate, up), *([biases] if model.mlp_bias else []), strict=True)
        )
        return (*given_by, by_row, *places)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, scores, chosen, order, router, gate, up = ctx.saved_tensors
        (mixture, model), places = ctx.passed, Places(chosen, order)
        again, ends = None if x is None else mixture.ranks.gather(x), places.ends(model.experts)
        del x
        by_gate, by_up, by_weights, *_ = gradients
        rows = experts.grouped(by_gate, experts.leaving(mixture.open(gate), len(ends)), ends)
        beside = experts.grouped(by_up, experts.leaving(mixture.open(up), len(ends)), ends)
        by_input = mixture.rows.combined(rows, places, beside)
        del rows, beside
        by_shares = _balance(mixture, model, places)
        by_scores = experts.by_scores(
            scores,
            places,
            by_weights,
            by_shares,
            normalised=model.router_normalised,
            routing=model.routed_by,
        ).to(router.dtype)
        summed = mixture.ranks.sum(by_input.addmm_(by_scores, router))
        if again is None:
            return None, summed().view(ctx.shape), *[None] * 7
        whole = again().flatten(0, -2)
        by_router = _by_router(mixture.sums, by_scores, whole)
        rows = mixture.rows.sent(whole, places)
        by_factors = [
            _by_experts(mixture, name, (by_given, rows), ends)
            for name, by_given in ((GATE, by_gate), (UP, by_up))
        ]
        by_score_bias = by_scores.sum(0) if ctx.needs_input_grad[6] else None
        by_biases = by_score_bias, *_by_biases(ctx.passed, places, (by_gate, by_up))
        return None, summed().view(ctx.shape), None, by_router, *by_factors, *by_biases


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


def _by_biases(
    passed: _Passed, places: Places, gradients: tuple[Tensor, Tensor]
) -> list[Tensor | None]:
    """The gradients of the first biases, of those by gate and up [rows, f]; as _by_router."""
    mixture, model = passed
    if not model.mlp_bias:
        return [None, None]
    vectors = expert_biases.unit_vectors(places, model.experts, gradients[0].dtype)
    named = zip((GATE_BIAS, UP_BIAS), gradients, strict=True)
    return [_by_matrix(mixture.sums, name, one, vectors) for name, one in named]


def _by_experts(
    mixture: Mixture, name: str, factors: tuple[Tensor, Tensor], ends: Tensor
) -> Tensor | None:
    """The gradient of experts' matrices, of its factors [rows, f] and [rows, h]; as _by_router."""
    if mixture.frozen:
        return None
    by = mixture.rows.put
    if mixture.sums is not None:
        mixture.sums.add_grouped(name, factors, ends, by)
        return None
    gradient, rows = factors
    total = rows.new_empty(gradient.shape[1] * len(ends), rows.shape[1])
    experts.add_grouped(total, factors, ends, fresh=True, by=by)
    return total


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
    def forward(ctx: Any, passed: _Passed, x: Tensor, inner: Tensor, *given: Any) -> Tensor:
        weights, *places, down, bias = given
        ctx.passed = passed
        read = None if bias is None else weights
        ctx.save_for_backward(None if passed.mixture.frozen else inner, read, *places, down, bias)
        return _added(passed, x, inner, Places(*places), _Last(down, bias, read))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        inner, weights, *places, down, bias = ctx.saved_tensors
        (by_output,), last = gradients, _Last(down, bias, weights)
        returned = _returned(ctx.passed, by_output, Places(*places), last)
        factors = inner, returned.rows
        by_down = _by_experts(ctx.passed.mixture, DOWN, factors, returned.ends)
        by_last = None, None, by_down, returned.by_bias
        return None, by_output, returned.by_inner, returned.by_weights, *by_last


class _Gated(Function):
    """The same of the weighted activation, which is never kept, as in products.py."""

    @staticmethod
    def forward(ctx: Any, passed: _Passed, x: Tensor, *given: Any) -> Tensor:
        gate, up, weights, *places, down, bias = given
        ctx.passed = passed
        ctx.save_for_backward(gate, up, weights, *places, down, bias)
        if passed.mixture.unread:
            return x.new_empty(()).expand_as(x)
        inner = passed.mixture.rows.weighted(gate, up, weights)
        return _added(passed, x, inner, Places(*places), _Last(down, bias, weights))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        gate, up, weights, *places, down, bias = ctx.saved_tensors
        (by_output,), last = gradients, _Last(down, bias, weights)
        rows, inner, ends, beside, by_bias = _returned(ctx.passed, by_output, Places(*places), last)
        backward = ctx.passed.mixture.rows.weighted_backward
        by_gate, by_up, by_weights = backward(gate, up, weights, inner)
        del gate, up  # which may have been computed again, and are as large
        if beside is not None:
            by_weights = by_weights + beside
        by_down = _by_experts(ctx.passed.mixture, DOWN, (inner, rows), ends)
        return None, by_output, by_gate, by_up, by_weights, None, None, by_down, by_bias


class _Last(NamedTuple):
    """The last matrix of experts, their last biases, and what these are weighted with."""

    down: Tensor
    bias: Tensor | None
    weights: Tensor | None


class _Returned(NamedTuple):
    """Gradients before the last product, and what those of its matrix are made of."""

    rows: Tensor  # by experts' results, [rows, h]
    by_inner: Tensor
    ends: Tensor
    by_weights: Tensor | None  # what biases add to it
    by_bias: Tensor | None


def _added(passed: _Passed, x: Tensor, inner: Tensor, places: Places, last: _Last) -> Tensor:
    """x, and the experts' results of rows `inner`, summed over all ranks' parts of them."""
    mixture, ends = passed.mixture, places.ends(passed.model.experts)
    rows = experts.grouped(inner, experts.leaving(mixture.open(last.down), len(ends)), ends)
    output = mixture.rows.combined(rows, places, None)
    if last.bias is not None:
        output.addmm_(_weights_of_all(passed, places, last, output.dtype), last.bias.T)
    return x + mixture.ranks.sum(output)().view(x.shape)


def _weights_of_all(passed: _Passed, places: Places, last: _Last, dtype: torch.dtype) -> Tensor:
    assert last.weights is not None
    count, ranks = passed.model.experts, passed.mixture.ranks
    return expert_biases.weights_of_all(places, last.weights, count, dtype, ranks)


def _returned(passed: _Passed, by_output: Tensor, places: Places, last: _Last) -> _Returned:
    """The gradients by experts' results and by the rows before the last product, and ends."""
    mixture, ends = passed.mixture, places.ends(passed.model.experts)
    gathered = mixture.ranks.gather(by_output)().flatten(0, -2)
    rows = mixture.rows.sent(gathered, places)
    by_inner = experts.grouped(rows, experts.entering(mixture.open(last.down), len(ends)), ends)
    if last.bias is None:
        return _Returned(rows, by_inner, ends, None, None)
    by_weights = expert_biases.by_row(places, gathered @ last.bias, len(ends), mixture.ranks)
    if mixture.frozen:
        return _Returned(rows, by_inner, ends, by_weights, None)
    weights = _weights_of_all(passed, places, last, gathered.dtype)
    by_bias = _by_matrix(mixture.sums, DOWN_BIAS, gathered, weights)
    return _Returned(rows, by_inner, ends, by_weights, by_bias)
