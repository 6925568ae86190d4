"""The gated delta rule of bigplan/spec/mixers.py in chunks of tokens, by plain torch.

A value head with queries q, keys k and values v, rates b and decays g <= 0 has a state S, and
S_t = exp(g_t) (S_{t-1} - b_t k_t (k_t^T S_{t-1})) + b_t k_t v_t^T, of which token t reads q_t^T S_t
(Yang et al., arXiv 2412.06464, section 3.1). Within a chunk, with c the sum of g up to a token and
L_ij = exp(c_i - c_j) for i >= j, all tokens' updates are one triangular system (section 3.3 there):

  (I + tril(b K K^T L, -1)) [U W] = b [V, exp(c) K]
  V' = U - W S,   O = exp(c) Q S + (Q K^T L) V',   S' = exp(c_last) S + (exp(c_last - c) K)^T V'

These are in fp32 whatever the compute dtype, as transformers has them. Only what the block's first
products give is saved: the backward runs all of it again, with a graph of its own. Where a GPU runs
generated kernels, those of bigplan/kernels/delta_rule.py do the same in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bigplan.mechanics import RULE_CHUNK as CHUNK
from bigplan.mechanics import rule_in_kernels
from bigplan.runtime.positions import Positions
from bigplan.runtime.ways import Parameters, Ways
from bigplan.spec.delta_steps import (
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

LENGTH_EPSILON = 1e-6  # added to the square of the length of queries and keys, likewise


def mixed(p: Parameters, x: Tensor, model: ModelSpec, positions: Positions, ways: Ways) -> Tensor:
    """What the rule makes of x, the normed residual stream, before its last product.

    `positions` tell how many tokens a sequence has.
    """
    rule, length = model.delta_rule, len(positions.tables[0])
    assert rule is not None, model.name
    products = ways.linears(p, (QUERIES, KEYS, VALUES, GATES, RATES, DECAYS), x)
    heads = [y.view(-1, length, y.shape[-1]) for y in products]
    others = [p[name] for name in (*FILTERS, LOG_DECAY, DECAY_OFFSET, NORM)]
    fits = rule_in_kernels(x.element_size(), (rule.key_dim, rule.value_dim), rule.taps)
    whole = positions.bounds is None  # the kernels know of no documents
    how = _InKernels if fits and whole and ways.kernels is not None else _Mixed
    return how.apply(rule, model.norm_epsilon, *heads, *others)  # type: ignore[no-any-return, no-untyped-call]


class _Mixed(Function):
    """Saves its inputs alone; the backward runs the forward again."""

    @staticmethod
    def forward(ctx: Any, rule: GatedDeltaRule, epsilon: float, *inputs: Tensor) -> Tensor:
        ctx.sizes = rule, epsilon
        ctx.save_for_backward(*inputs)
        return gated(rule, epsilon, *inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        asked = ctx.needs_input_grad[2:]
        inputs = [
            x.detach().requires_grad_(wanted)
            for x, wanted in zip(ctx.saved_tensors, asked, strict=True)
        ]
        with torch.enable_grad():
            output = gated(*ctx.sizes, *inputs)
        leaves = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(output, leaves, gradients[0]))
        return None, None, *(next(found) if wanted else None for wanted in asked)


class _InKernels(Function):
    """The same."""

    @staticmethod
    def forward(ctx: Any, rule: GatedDeltaRule, epsilon: float, *inputs: Tensor) -> Tensor:
        from bigplan.kernels import delta_rule as kernels

        ctx.sizes = rule, epsilon
        ctx.save_for_backward(*inputs)
        return kernels.forward(rule, epsilon, *inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from bigplan.kernels import delta_rule as kernels

        asked = ctx.needs_input_grad[2:]
        found = kernels.backward(*ctx.sizes, gradients[0], asked, *ctx.saved_tensors)
        return None, None, *found


def gated(rule: GatedDeltaRule, epsilon: float, *inputs: Tensor) -> Tensor:
    """What the rule gives, normed and gated, [b, s, value heads * value_dim].

    `inputs`: queries, keys, values and gates [b, s, heads * width], rates and decays [b, s, value
    heads], filters of the first three, A_log, dt_bias and the norm's weight.
    """
    *vectors, gates, rates, decays = inputs[:6]
    *filters, log_decay, offset, weight = inputs[6:]
    convolved = (F.silu(_convolved(x, own)) for x, own in zip(vectors, filters, strict=True))
    key_heads, width = vectors[0].shape[-1] // rule.key_dim, rule.value_dim
    q, k, v = (
        _by_head(x, key_heads, each)
        for x, each in zip(convolved, (rule.key_dim, rule.key_dim, width), strict=True)
    )
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPSILON) for x in (q, k))
    fades = -_wide(log_decay).exp() * F.softplus(_wide(decays) + _wide(offset))
    rate, fade = (_by_head(x, key_heads, 1).squeeze(-1) for x in (rates.sigmoid(), fades))
    read = delta_rule(q * rule.key_dim**-0.5, k, v, rate, fade)
    read = _wide(read.flatten(1, 2).transpose(1, 2).to(gates.dtype))  # as transformers rounds it
    normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + epsilon)
    normed = weight * normed.to(gates.dtype)
    gate = F.silu(_wide(torch.unflatten(gates, -1, (-1, width))))
    return (normed * gate).to(gates.dtype).flatten(2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, rate: Tensor, fade: Tensor) -> Tensor:
    """The rule of q and k [b, key heads, 1, s, key_dim], v [b, key heads, r, s, value_dim], and
    rates and decays [b, key heads, r, s], all fp32: as v.
    """
    length, missing = v.shape[-2], -v.shape[-2] % CHUNK
    q, k, v = (torch.unflatten(F.pad(x, (0, 0, 0, missing)), -2, (-1, CHUNK)) for x in (q, k, v))
    rate, fade = (torch.unflatten(F.pad(x, (0, missing)), -1, (-1, CHUNK)) for x in (rate, fade))
    reach, rate = fade.cumsum(-1).unsqueeze(-1), rate.unsqueeze(-1)  # [..., chunks, CHUNK, 1]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    between = (reach - reach.mT).masked_fill(later, float("-inf")).exp()
    faded = reach.exp()
    system = rate * (k @ k.mT) * between
    right = rate * torch.cat((v, (faded * k)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    last = reach[..., -1:, :]
    parts = (
        *solved.split((v.shape[-1], k.shape[-1]), dim=-1),  # U and W
        (q @ k.mT) * between,
        faded * q,
        ((last - reach).exp() * k).mT,
        last.exp(),
    )
    state, read = None, []
    for new, old, scores, asks, gives, stays in zip(*(x.unbind(3) for x in parts), strict=True):
        if state is None:
            read.append(scores @ new)
            state = gives @ new
        else:
            own = new - old @ state
            read.append(asks @ state + scores @ own)
            state = stays * state + gives @ own
    return torch.stack(read, dim=3).flatten(3, 4)[..., :length, :]


def _convolved(x: Tensor, filters: Tensor) -> Tensor:
    """The sum over the last taps tokens of x [b, s, c] times their channels' filters [c, taps]."""
    taps, length = filters.shape[1], x.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    total = x * filters[:, -1]
    for tap in range(taps - 1):
        total = torch.addcmul(total, padded[:, tap : tap + length], filters[:, tap])
    return total


def _by_head(x: Tensor, key_heads: int, width: int) -> Tensor:
    """[b, s, heads * width] in fp32 as [b, key heads, heads of each, s, width]."""
    heads = torch.unflatten(x, -1, (key_heads, -1, width))
    return _wide(heads.permute(0, 2, 3, 1, 4))


def _wide(x: Tensor) -> Tensor:
    """In fp32, or wider where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
