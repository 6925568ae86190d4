"""The gated delta rule of bigplan/spec/mixers.py in chunks of tokens, by plain torch.

A value head with queries q, keys k and values v, rates b and decays g <= 0 has a state S, and
S_t = exp(g_t) (S_{t-1} - b_t k_t (k_t^T S_{t-1})) + b_t k_t v_t^T, of which token t reads q_t^T S_t
(Yang et al., arXiv 2412.06464, section 3.1). Within a chunk, with c the sum of g up to a token and
L_ij = exp(c_i - c_j) for i >= j, all tokens' updates are one triangular system (section 3.3 there):

  (I + tril(b K K^T L, -1)) [U W] = b [V, exp(c) K]
  V' = U - W S,   O = exp(c) Q S + (Q K^T L) V',   S' = exp(c_last) S + (exp(c_last - c) K)^T V'

Context-parallel ranks exchange tokens for heads before the convolution, and back after the gate:
all of this is of whole sequences.

Where documents are kept apart, a chunk's tokens of other documents have L = 0, and those of a
document that begins within the chunk have nothing of S: for them exp(c) = 0 before Q and K. If the
chunk's last token is one of these, exp(c_last) is 0, too. The convolution reads no token before its
document.

These are in fp32 whatever the compute dtype, as transformers has them. Only what the block's first
products give is saved: the backward runs all of it again, with a graph of its own. Where a GPU runs
generated kernels, those of bigplan/kernels/handwritten/delta_rule.py do the same in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bigplan.mechanics import RULE_CHUNK as CHUNK
from bigplan.mechanics import rule_in_kernels
from bigplan.runtime.mixers.chunks import documents_in_chunks
from bigplan.runtime.mixers.made_again import made_again
from bigplan.runtime.mixers.positions import Positions
from bigplan.runtime.mixers.silu_convolution import silu_convolved
from bigplan.runtime.mixers.ways import Parameters, Ways
from bigplan.runtime.operators import wide
from bigplan.spec.delta_rule_steps import (
    DECAY_OFFSET,
    DECAYS,
    FILTERS,
    GATES,
    KEYS,
    LOG_DECAY,
    NORM,
    QUERIES,
    RATES,
    VALUES,
)
from bigplan.spec.mixers import GatedDeltaRule
from bigplan.spec.model import ModelSpec

LENGTH_EPSILON = 1e-6  # added to the square of a length of queries and keys, as transformers does


def mixed(p: Parameters, x: Tensor, model: ModelSpec, positions: Positions, ways: Ways) -> Tensor:
    """What the rule makes of x, the normed residual stream, before its last product.

    `positions` tell how many tokens of a sequence this rank has, and where documents begin.
    """
    bounds = positions.bounds
    begins = None if bounds is None else bounds[:, 0]
    rule, length, context = model.delta_rule, len(positions.tables[0]), ways.context
    assert rule is not None, model.name
    products = list(ways.linears(p, (QUERIES, KEYS, VALUES, GATES, RATES, DECAYS), x))
    widths = (rule.key_dim,) * 2 + (rule.value_dim,) * 2 + (1,) * 2
    heads = []
    for width in widths:  # a product is freed once its heads are here
        own = products.pop(0)
        heads.append(context.heads_side_by_side(own.view(-1, length, own.shape[-1]), width))
    rule = _of_rank(rule, heads)
    filters = [context.own_heads(p[n], width) for n, width in zip(FILTERS, widths, strict=False)]
    others = [*filters, *(context.own_heads(p[n]) for n in (LOG_DECAY, DECAY_OFFSET)), p[NORM]]
    epsilon = rule.norm_epsilon or model.norm_epsilon
    fits = rule_in_kernels(x.element_size(), (rule.key_dim, rule.value_dim), rule.taps)
    if fits and ways.kernels is not None:
        output = InKernels.apply(rule, epsilon, begins, *heads, *others)  # type: ignore[no-untyped-call]
    else:
        output = in_torch(rule, epsilon, begins, *heads, *others)
    return context.tokens_of_all_heads(output)


def _of_rank(rule: GatedDeltaRule, heads: Sequence[Tensor]) -> GatedDeltaRule:
    """The rule of a rank's heads; of a key head that several have, each has some value heads."""
    keys, values = heads[1].shape[-1] // rule.key_dim, heads[2].shape[-1] // rule.value_dim
    return rule.model_copy(update={"key_heads": keys, "value_heads": values})


def in_torch(
    rule: GatedDeltaRule, epsilon: float, begins: Tensor | None, *inputs: Tensor
) -> Tensor:
    """As `gated`; only the inputs are saved, and the backward runs it again."""
    return made_again(partial(gated, rule, epsilon, begins), *inputs)


class InKernels(Function):
    """The same by kernels."""

    @staticmethod
    def forward(
        ctx: Any, rule: GatedDeltaRule, epsilon: float, begins: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        from bigplan.kernels.handwritten.delta_rule import How, forward

        ctx.rule, ctx.epsilon = rule, epsilon
        ctx.save_for_backward(begins, *inputs)
        return forward(How(rule, epsilon, begins), *inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from bigplan.kernels.handwritten.delta_rule import How, backward

        begins, *inputs = ctx.saved_tensors
        asked = ctx.needs_input_grad[3:]
        how = How(ctx.rule, ctx.epsilon, begins)
        found = backward(how, gradients[0], asked, *inputs)
        return None, None, None, *found


def gated(rule: GatedDeltaRule, epsilon: float, begins: Tensor | None, *inputs: Tensor) -> Tensor:
    """What the rule gives, normed and gated, [b, s, value heads * value_dim].

    `begins`: the first token of each token's document, int32 [b, s]; None: it is one. `inputs`:
    queries, keys, values and gates [b, s, heads * width], rates and decays [b, s, value heads],
    filters of the first three, A_log, dt_bias and the norm's weight.
    """
    *vectors, gates, rates, decays = inputs[:6]
    *filters, log_decay, offset, weight = inputs[6:]
    convolved = (
        silu_convolved(x, own, begins=begins) for x, own in zip(vectors, filters, strict=True)
    )
    key_heads, width = vectors[0].shape[-1] // rule.key_dim, rule.value_dim
    q, k, v = (
        _by_head(x, key_heads, each)
        for x, each in zip(convolved, (rule.key_dim, rule.key_dim, width), strict=True)
    )
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPSILON) for x in (q, k))
    fades = -wide(log_decay).exp() * F.softplus(wide(decays) + wide(offset))
    found = rates.sigmoid() if rule.rate_scale == 1 else rates.sigmoid() * rule.rate_scale
    rate, fade = (_by_head(x, key_heads, 1).squeeze(-1) for x in (found, fades))
    read = delta_rule(q * rule.key_dim**-0.5, k, v, (rate, fade), begins)
    read = wide(read.flatten(1, 2).transpose(1, 2).to(gates.dtype))  # as transformers rounds it
    normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + epsilon)
    normed = weight * normed.to(gates.dtype)
    gate = F.silu(wide(torch.unflatten(gates, -1, (-1, width))))
    return (normed * gate).to(gates.dtype).flatten(2)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, rates: tuple[Tensor, Tensor], begins: Tensor | None = None
) -> Tensor:
    """The rule of q and k [b, key heads, 1, s, key_dim], v [b, key heads, r, s, value_dim], and
    rates and decays [b, key heads, r, s], all fp32: as v. `begins` as gated's.
    """
    (rate, fade), length, missing = rates, v.shape[-2], -v.shape[-2] % CHUNK
    q, k, v = (torch.unflatten(F.pad(x, (0, 0, 0, missing)), -2, (-1, CHUNK)) for x in (q, k, v))
    rate, fade = (torch.unflatten(F.pad(x, (0, missing)), -1, (-1, CHUNK)) for x in (rate, fade))
    reach, rate = fade.cumsum(-1).unsqueeze(-1), rate.unsqueeze(-1)  # [..., chunks, CHUNK, 1]
    last = reach[..., -1:, :]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    others, before, after, both = _hidden(later, begins, missing)
    between = _faded(reach - reach.mT, others)
    faded, left, stays = _faded(reach, before), _faded(last - reach, after), _faded(last, both)
    system = rate * (k @ k.mT) * between
    right = rate * torch.cat((v, (faded * k)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    parts = (
        *solved.split((v.shape[-1], k.shape[-1]), dim=-1),  # U and W
        (q @ k.mT) * between,
        faded * q,
        (left * k).mT,
        stays,
    )
    state, read = None, []
    for new, old, scores, asks, gives, stay in zip(*(x.unbind(3) for x in parts), strict=True):
        if state is None:
            read.append(scores @ new)
            state = gives @ new
        else:
            own = new - old @ state
            read.append(asks @ state + scores @ own)
            state = stay * state + gives @ own
    return torch.stack(read, dim=3).flatten(3, 4)[..., :length, :]


def _faded(exponent: Tensor, hidden: Tensor | None) -> Tensor:
    """Its exponential, 0 where hidden."""
    if hidden is not None:
        exponent = exponent.masked_fill(hidden, -inf)
    return exponent.exp()


def _hidden(
    later: Tensor, begins: Tensor | None, missing: int
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What is hidden in each chunk: from a token others [CHUNK, CHUNK], and the state before
    [CHUNK, 1]; from the state after tokens [CHUNK, 1], and the state before [1, 1]; None: nothing.

    `later`: which others come later. `missing`: tokens that fill up the last chunk.
    """
    if begins is None:
        return later, None, None, None
    apart, within = (x[:, None, None] for x in documents_in_chunks(begins, CHUNK, missing))
    return later | apart, within, apart[..., -1:, :].mT, within[..., -1:, :]


def _by_head(x: Tensor, key_heads: int, width: int) -> Tensor:
    """[b, s, heads * width] in fp32 as [b, key heads, heads of each, s, width]."""
    heads = torch.unflatten(x, -1, (key_heads, -1, width))
    return wide(heads.permute(0, 2, 3, 1, 4))
