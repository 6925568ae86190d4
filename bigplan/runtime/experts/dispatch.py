"""Experts of a block: where tokens are sent, products of each expert's rows, and the way back.

Each of a token's k experts gets a copy of it, a row. Rows of one expert lie together, those of a
smaller number first, each in the order of tokens, so that one grouped product serves all experts
whatever number of rows each has. That number stays on the device: nothing here waits for it, and a
CUDA graph may hold it. Nothing is added in an order that chance decides, either: rows come back to
their tokens by a gather, and a sum over k.

Only what places rows is kept of them, two numbers each. Rows themselves are copied again in the
backward. An expert's result is weighted before its last product, so that results of experts need
not be kept for the weights' gradients.

On CUDA products in bf16 are torch's grouped ones, which have kernels for compute capabilities 9 and
10 (aten/src/ATen/native/cuda/GroupMM.cu). Otherwise, and where experts' own products are large,
they run expert by expert, and the CPU waits for the rows' numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bigplan.mechanics import groups_in_one, worth_apart
from bigplan.runtime.add_product import add_product
from bigplan.runtime.constants import values_of
from bigplan.runtime.experts import sparsemixer
from bigplan.runtime.experts.activations import Activation, plain_activation
from bigplan.runtime.operators import numbers_of
from bigplan.spec.routing import Routing

LIKELIEST = Routing()
GENERATIONS = (9, 10)  # compute capabilities, major, that it has kernels for


class Places(NamedTuple):
    """Where the rows of a micro-batch's tokens are, for k experts a token.

    Some choices may have no row here, because their experts are elsewhere.
    """

    chosen: Tensor  # int32 [tokens, k]: a token's experts; larger than any where they are elsewhere
    order: Tensor  # int32 [rows]: the choice (token * k + number) that a row belongs to

    @property
    def tokens(self) -> Tensor:
        """The token that a row is a copy of, int32 [rows]."""
        return self.order // self.chosen.shape[1]

    @property
    def rows(self) -> Tensor:
        """The row of a choice, int32 [tokens * k]; -1 where it has none."""
        numbers = torch.arange(len(self.order), dtype=torch.int32, device=self.order.device)
        found = torch.full_like(self.chosen, -1).flatten()
        return found.scatter_(0, self.order.long(), numbers)

    def ends(self, experts: int) -> Tensor:
        """How many rows the experts up to each have together, int32 [experts]."""
        numbers = torch.arange(experts, dtype=torch.int32, device=self.order.device)
        sorted_experts = self.chosen.flatten()[self.order]
        return torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)


def route(
    scores: Tensor,
    each: int,
    *,
    normalised: bool,
    routing: Routing = LIKELIEST,
    bias: Tensor | None = None,
) -> tuple[Tensor, Places]:
    """`each` experts of every token by scores [tokens, experts], and rows for them.

    Weights are the experts' shares in fp32, where `normalised` those of a token divided by their
    sum: fp32 by row. A bias, `routing`'s, is fp32 [experts] as terms of a constant.
    """
    shares, chosen = _shares_of_chosen(scores, each, routing, bias)
    if normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    if routing.scale != 1:
        shares = shares * routing.scale
    order = in_order(chosen)
    return shares.flatten()[order], Places(chosen.to(torch.int32), order)


def _shares_of_chosen(
    scores: Tensor, each: int, routing: Routing, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Shares in fp32 of every token's experts and these, int64: [tokens, each]."""
    if routing.scores == "sparsemixer":
        return sparsemixer.shares(scores.float(), each, routing.jitter)
    every = shares_of(scores, routing)
    if bias is None and routing.groups == 1:
        shares, chosen = every.topk(each, dim=-1)
        return shares, chosen
    wanted = every if routing.bias_of == "shares" else scores.float()
    chosen = _chosen(wanted, each, routing, bias)
    return every.gather(-1, chosen), chosen


def in_order(chosen: Tensor) -> Tensor:
    """Choices [tokens, k] by their number, those of one number in the order of tokens: int32."""
    # Fewer bits are sorted in fewer passes.
    return chosen.flatten().to(torch.int16).sort(stable=True).indices.to(torch.int32)


def router_scores(
    x: Tensor, router: Tensor, routing: Routing, bias: Tensor | None = None
) -> Tensor:
    """Scores of experts [tokens, experts] of x [tokens, h]; those that sigmoids read are in fp32.

    So they are in DeepSeek-V3 and GLM-4.5, whose experts near ties lie close beside each other.
    """
    if routing.scores != "sigmoid" or x.dtype is torch.float32:
        scores = F.linear(x, router, bias)
    elif x.is_cuda:
        scores = torch.mm(x, router.T, out_dtype=torch.float32)
        scores = scores if bias is None else scores + bias
    else:
        scores = F.linear(x.float(), router.float(), None if bias is None else bias.float())
    return scores if routing.score_scale == 1 else scores.mul_(routing.score_scale)


def shares_of(scores: Tensor, routing: Routing) -> Tensor:
    """Shares of experts in fp32, of scores [tokens, experts]; of SparseMixer for the balance."""
    wide = scores.float()
    return wide.sigmoid() if routing.scores == "sigmoid" else wide.softmax(-1)


def _chosen(shares: Tensor, each: int, routing: Routing, bias: Tensor | None) -> Tensor:
    """The experts of every token where a bias or groups have a say, int64 [tokens, each].

    As transformers' routers of DeepSeek-V3 choose: of each group the best experts count.
    """
    wanted = shares if bias is None else shares + values_of(bias)
    if routing.groups > 1:
        by_group = wanted.view(len(wanted), routing.groups, -1)
        best = by_group.topk(routing.group_best, dim=-1).values.sum(-1)
        groups = best.topk(routing.groups_per_token, dim=-1).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, groups, False)
        wanted = by_group.masked_fill(left_out[..., None], float("-inf")).flatten(1)
    return wanted.topk(each, dim=-1).indices


def by_scores(
    scores: Tensor,
    places: Places,
    by_weights: Tensor,
    by_shares: Tensor | None,
    *,
    normalised: bool,
    routing: Routing = LIKELIEST,
) -> Tensor:
    """The gradient by `route`'s scores, fp32, of that by its weights, fp32 [rows].

    `by_shares`, fp32 [experts], is added to the gradient by every token's probabilities.
    """
    shares, chosen = shares_of(scores, routing), places.chosen.long()
    by_choice = by_weights[places.rows].view(chosen.shape)
    if routing.scale != 1:
        by_choice = by_choice * routing.scale
    if normalised:
        mine = shares.gather(-1, chosen)
        total = mine.sum(-1, keepdim=True)
        by_choice = (by_choice - (by_choice * mine).sum(-1, keepdim=True) / total) / total
    by_probability = torch.zeros_like(shares)
    in_turn = routing.scores == "sparsemixer"
    if not in_turn:
        by_probability.scatter_(-1, chosen, by_choice)
    if by_shares is not None:
        by_probability += by_shares
    if routing.scores == "sigmoid":
        return by_probability * shares * (1.0 - shares)
    found = shares * (by_probability - (by_probability * shares).sum(-1, keepdim=True))
    if in_turn:
        found += sparsemixer.by_scores(scores.float(), chosen, by_choice, routing.jitter)
    return found


def by_product(by_scores: Tensor, routing: Routing) -> Tensor:
    """The gradient by the product that `router_scores` makes scores of."""
    return by_scores if routing.score_scale == 1 else by_scores * routing.score_scale


def balance_gradient(places: Places, experts: int, coefficient: float) -> Tensor:
    """The gradient of coefficient * E * sum_e f_e P_e by any token's probabilities, fp32 [experts].

    f_e is the number of choices of expert e per token, which has no gradient; P_e is the mean over
    tokens of its probability (Fedus et al., arXiv 2101.03961, equations 4 to 6).
    """
    ends, tokens = places.ends(experts), len(places.chosen)
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).float()
    return counts * (coefficient * experts / tokens / tokens)


def sent(x: Tensor, places: Places) -> Tensor:
    """The rows [rows, h] of tokens x [tokens, h]."""
    return x.index_select(0, places.tokens)


def combined(rows: Tensor, places: Places, beside: Tensor | None = None) -> Tensor:
    """For each token the sum of its rows [rows, h], and of those beside: [tokens, h].

    Nobody may read `rows` after this.
    """
    tokens, each = places.chosen.shape
    if beside is not None:
        rows += beside
    if len(rows) < tokens * each:
        found = rows.new_zeros(tokens * each, rows.shape[1])
        found.index_copy_(0, places.order.long(), rows)
    else:
        found = rows.index_select(0, places.rows)
    return found if each == 1 else found.view(tokens, each, rows.shape[1]).sum(1)


def put(total: Tensor, part: Tensor, *, fresh: bool) -> None:
    """Add `part` to `total`, or copy it to a fresh one."""
    if fresh:
        total.copy_(part)
    else:
        total.add_(part)


class Put(Protocol):
    """As `put`."""

    def __call__(self, total: Tensor, part: Tensor, *, fresh: bool) -> None:
        """Add, or copy."""


class Adds(Protocol):
    """Adds what it has to `total`, or overwrites a fresh one."""

    def __call__(self, total: Tensor, *, fresh: bool) -> None:
        """Add, or overwrite."""


class RowOperators(NamedTuple):
    """What passes over rows, and over gradients of experts: torch's operators, or kernels."""

    sent: Callable[[Tensor, Places], Tensor] = sent
    combined: Callable[[Tensor, Places, Tensor | None], Tensor] = combined
    put: Put = put
    # Of a model's `mlp`, and of what its weights weigh.
    activation: Callable[[str, str], Activation] = plain_activation


def entering(weight: Tensor, experts: int) -> Tensor:
    """All experts' matrices [f * experts, h], as factors of rows [., h]: [experts, h, f]."""
    return weight.view(-1, experts, weight.shape[-1]).permute(1, 2, 0)


def leaving(weight: Tensor, experts: int) -> Tensor:
    """All experts' matrices [f * experts, h], as factors of rows [., f]: [experts, f, h]."""
    return weight.view(-1, experts, weight.shape[-1]).transpose(0, 1)


def grouped(rows: Tensor, factors: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows [rows, in] by its factor of [experts, in, out]: [rows, out]."""
    if len(rows) and _has_kernel(rows, factors, factors.shape[1:], len(ends)):
        return F.grouped_mm(rows, factors, offs=ends)
    found = rows.new_empty(len(rows), factors.shape[-1])
    for expert, mine in slices(ends):
        torch.mm(rows[mine], factors[expert], out=found[mine])
    return found


def add_grouped(
    total: Tensor,
    factors: tuple[Tensor, Tensor],
    ends: Tensor,
    *,
    fresh: bool,
    by: Put = put,
) -> None:
    """Add each expert's gradient^T rows to `total` [f * experts, h], or overwrite a fresh one.

    The factors, gradient [rows, f] and rows [rows, h], are of one dtype. A grouped product gives
    all experts' results in that dtype, to be added. Products of one expert each are added as
    others' are, or to a total in 16 bits afterwards.
    """
    places, (gradient, rows) = leaving(total, len(ends)), factors
    widths = gradient.shape[1], rows.shape[1]
    if len(rows) and _has_kernel(gradient, rows, widths, len(ends)):
        by(places, F.grouped_mm(gradient.T, rows, offs=ends), fresh=fresh)
        return
    for expert, mine in slices(ends):
        if total.dtype is torch.float32 and mine.stop > mine.start:
            add_product(places[expert], gradient[mine], rows[mine], fresh=fresh)
        else:
            put(places[expert], gradient[mine].T @ rows[mine], fresh=fresh)


def slices(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert and its rows; the CPU waits for the device here."""
    for expert, (first, last) in enumerate(pairwise((0, *numbers_of(ends)))):
        yield expert, slice(first, last)


def stays_on_device(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of this dtype run there without waiting for numbers of rows."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] in GENERATIONS


def _has_kernel(a: Tensor, b: Tensor, widths: Sequence[int], experts: int) -> bool:
    """Whether torch has a kernel for these factors that is worth taking.

    `a` has all rows; `widths` are the sides that are no rows.
    """
    if not stays_on_device(a.device, a.dtype) or not groups_in_one(experts, *widths):
        return False
    if worth_apart(len(a) / experts, *widths):
        return False
    starts = (a.data_ptr(), b.data_ptr())
    return all(n % 16 == 0 for n in starts)
