"""The state space of bigplan/spec/mixers.py in chunks of tokens, by plain torch.

A head with values x, time steps d, keys B and queries C of its group, and a rate a < 0 has a state
S, and S_t = exp(a d_t) S_{t-1} + d_t B_t x_t^T, of which token t reads C_t^T S_t + D x_t (Dao and
Gu, arXiv 2405.21060, section 5). Within a chunk, with c the sum of a d up to a token and
L_ij = exp(c_i - c_j) for i >= j (section 6 there):

  Y = (C B^T L) (d x) + exp(c) C S,   S' = exp(c_last) S + B^T (exp(c_last - c) d x)

Heads of a group share B and C, so that products by these are of all of their values side by side.
Time steps, decays, states and the norm are in fp32, products of chunks in the compute dtype, as
Mamba-2's own kernels have them (state-spaces/mamba, ssd_chunk_state.py and ssd_chunk_scan.py).
Only what the block's first products give is saved: the backward runs all of it again, with a graph
of its own. Where a GPU runs generated kernels, those of bigplan/kernels/handwritten/state_space.py
do the same for whole sequences, and bigplan/kernels/handwritten/gated_norm.py the norm.

Context-parallel ranks exchange tokens for heads before the convolution, with their groups, and back
before gate and norm. So a rank has all heads of its tokens in the norm, and keeps what is read.

Where documents are kept apart, the convolution reads no token before its document, and tokens know
nothing of others and of states that are not their document's, as in delta_rule.py.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from bigplan.mechanics import SPACE_CHUNK as CHUNK
from bigplan.mechanics import space_in_kernels
from bigplan.runtime import generated
from bigplan.runtime.mixers.chunks import documents_in_chunks
from bigplan.runtime.mixers.made_again import made_again
from bigplan.runtime.mixers.positions import Positions
from bigplan.runtime.mixers.silu_convolution import silu_convolved
from bigplan.runtime.mixers.ways import Parameters, Ways
from bigplan.runtime.operators import RmsRule, wide
from bigplan.runtime.parallel.tensor_parallel import ONE, TensorParallel
from bigplan.runtime.parallel.wide_norm import wide_norm
from bigplan.spec.mixers import StateSpace
from bigplan.spec.model import ModelSpec
from bigplan.spec.state_space_steps import (
    CONVOLVED,
    GATES,
    KEYS,
    LOG_DECAY,
    NORM,
    QUERIES,
    SKIP,
    STEP_OFFSET,
    STEPS,
    VALUES,
)

if TYPE_CHECKING:
    from bigplan.kernels.library import Library


def mixed(p: Parameters, x: Tensor, model: ModelSpec, positions: Positions, ways: Ways) -> Tensor:
    """What the state space makes of x, the normed residual stream, before its last product.

    `positions` tell how many tokens of a sequence this rank has, and where documents begin.
    """
    space, length, context = model.state_space, len(positions.tables[0]), ways.context
    assert space is not None, model.name
    bounds = positions.bounds
    begins = None if bounds is None else bounds[:, 0]
    products = list(ways.linears(p, (GATES, VALUES, KEYS, QUERIES, STEPS), x))
    gates, *inputs = (y.view(-1, length, y.shape[-1]) for y in products)
    del products
    widths = space.head_dim, space.state, space.state
    parts = ("weight", "bias") if space.convolution_bias else ("weight",)
    filters = [
        context.own_heads(p[f"{name}.{part}"], width)
        for part in parts
        for name, width in zip(CONVOLVED, widths, strict=True)
    ]
    numbers = [context.own_heads(p[name]) for name in (LOG_DECAY, STEP_OFFSET, SKIP)]
    norm = Norm(model.norm_epsilon, ways.ranks, ways.kernels)
    weight = (p[NORM],) if space.norm else ()
    if context.group.size == 1:
        run, others = partial(gated, space, norm, begins=begins), (*numbers, *weight, *filters)
        return made_again(run, gates, *inputs, *others)
    heads = []
    for width in (*widths, 1):  # a product is freed once its heads are here
        heads.append(context.heads_side_by_side(inputs.pop(0), width))
    read = made_again(partial(read_by, ways.kernels, begins, space), *heads, *numbers, *filters)
    del heads
    closed = partial(_gated_and_normed, space, norm)
    return made_again(closed, gates, context.tokens_of_all_heads(read), *weight)


class Norm(NamedTuple):
    """The norm of a gated result, the ranks that share it, and kernels for it and the gate."""

    epsilon: float
    ranks: TensorParallel = ONE
    kernels: Library | None = None


def gated(space: StateSpace, norm: Norm, *inputs: Tensor, begins: Tensor | None = None) -> Tensor:
    """What heads read, gated and normed, [b, s, heads * head_dim] of this rank's heads.

    `inputs`: gates, values, keys, queries and time steps [b, s, .], then A_log, dt_bias, D and the
    norm's weight if it has one, then filters of values, keys and queries, and their biases if any.
    `begins`: the first token of each token's document, int32 [b, s]; None: a sequence is one.
    """
    behind = 8 + space.norm
    gates, *given = inputs[:8]
    read = read_by(norm.kernels, begins, space, *given, *inputs[behind:])
    return _gated_and_normed(space, norm, gates, read, *inputs[8:behind])


def read_by(
    kernels: Library | None, begins: Tensor | None, space: StateSpace, *inputs: Tensor
) -> Tensor:
    """What heads read, by kernels where there are some that take it: they know of no documents."""
    inputs = _scaled(space, *inputs)
    widths = space.state, space.head_dim
    fits = space_in_kernels(inputs[0].element_size(), widths, space.taps)
    if fits and begins is None and kernels is not None:
        return InKernels.apply(space, *inputs)  # type: ignore[no-any-return, no-untyped-call]
    return in_torch(space, *inputs, begins=begins)


def _scaled(space: StateSpace, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The same with the state space's factors.

    A convolution's filters are multiplied in place of what it reads, of which there is more.
    """
    if not space.scales:
        return inputs
    _, *of_heads, of_steps = space.scales
    vectors, steps, numbers, filters, biases = (
        inputs[a:b] for a, b in pairwise((0, 3, 4, 7, 10, None))
    )
    filters = tuple(x * scale for x, scale in zip(filters, of_heads, strict=True))
    return *vectors, steps[0] * of_steps, *numbers, *filters, *biases


class InKernels(Function):
    """As in_torch, by kernels. It saves what they make, so `made_again` is around it."""

    @staticmethod
    def forward(ctx: Any, space: StateSpace, *inputs: Tensor) -> Tensor:
        from bigplan.kernels.handwritten import state_space as kernels

        read, made = kernels.forward(space, *inputs)
        ctx.space = space
        ctx.save_for_backward(*made, *inputs)
        return read

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from bigplan.kernels.handwritten import state_space as kernels

        count = len(kernels.Made._fields)
        made, inputs = kernels.Made(*ctx.saved_tensors[:count]), ctx.saved_tensors[count:]
        asked = ctx.needs_input_grad[1:]
        return None, *kernels.backward(ctx.space, gradients[0], asked, made, *inputs)


def in_torch(space: StateSpace, *inputs: Tensor, begins: Tensor | None = None) -> Tensor:
    """What heads read, with D x, [b, s, heads * head_dim]; `gated` adds the gate and the norm."""
    *vectors, steps, log_decay, offset, skip = inputs[:7]
    filters, biases = inputs[7:10], inputs[10:] or (None,) * 3
    values, keys, queries = (
        silu_convolved(*one, begins) for one in zip(vectors, filters, biases, strict=True)
    )
    groups = keys.shape[-1] // space.state
    values = torch.unflatten(values, -1, (groups, -1, space.head_dim))
    keys, queries = (torch.unflatten(x, -1, (groups, -1)) for x in (keys, queries))
    steps = F.softplus(wide(steps) + wide(offset))
    if space.least_step or space.most_step is not None:
        steps = steps.clamp(space.least_step, space.most_step)
    fades = -wide(log_decay).exp() * steps
    steps, fades = (torch.unflatten(x, -1, (groups, -1)) for x in (steps, fades))
    read = state_space(values, (steps, fades), keys, queries, begins)
    return torch.addcmul(read, skip.view(groups, -1, 1), values).flatten(2)


def state_space(
    values: Tensor,
    rates: tuple[Tensor, Tensor],
    keys: Tensor,
    queries: Tensor,
    begins: Tensor | None = None,
) -> Tensor:
    """What is read of states, as values [b, s, groups, heads of each, head_dim].

    `rates`: steps and fades, fp32 [b, s, groups, heads of each]. Keys and queries are
    [b, s, groups, state]. `begins` as `gated` has it.
    """
    (steps, fades), length, dtype = rates, values.shape[1], values.dtype
    given = _chunked(values * steps.to(dtype).unsqueeze(-1))
    reach = _chunked(fades).cumsum(2)  # [b, chunks, CHUNK, groups, heads of each]
    keys, queries = (_chunked(x).transpose(2, 3) for x in (keys, queries))
    by_head = reach.permute(0, 1, 3, 4, 2).unsqueeze(-1)  # [b, chunks, groups, heads, CHUNK, 1]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=values.device).triu(1)
    others, before, after, both = _hidden(later, begins)
    between = (by_head - by_head.mT).masked_fill_(others, -inf).exp_().to(dtype)
    within = ((queries @ keys.mT).unsqueeze(3) * between) @ given.permute(0, 1, 3, 4, 2, 5)
    last = reach[:, :, -1:]
    lasting = _hiding(last - reach, after).exp_().to(dtype).unsqueeze(-1) * given
    added = keys.mT @ lasting.transpose(2, 3).flatten(4)  # [b, chunks, groups, state, heads * dim]
    sizes = given.shape[-2:]
    states = _states(torch.unflatten(added, -1, sizes), _hiding(last, both).exp().transpose(2, 3))
    read = torch.unflatten(queries @ states.flatten(4), -1, sizes).transpose(2, 3)
    inside = within.permute(0, 1, 4, 2, 3, 5)
    read = torch.addcmul(inside, read, _hiding(reach, before).exp().to(dtype).unsqueeze(-1))
    return read.flatten(1, 2)[:, :length]


def _hiding(exponent: Tensor, hidden: Tensor | None) -> Tensor:
    """With an exponential of 0 where hidden."""
    return exponent if hidden is None else exponent.masked_fill(hidden, -inf)


def _hidden(
    later: Tensor, begins: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What is hidden in each chunk: from a token others [CHUNK, CHUNK], and the state before
    [CHUNK, 1, 1]; from the state after tokens [CHUNK, 1, 1], and the state before [1, 1, 1]; None:
    nothing.

    `later`: which others come later.
    """
    if begins is None:
        return later, None, None, None
    apart, within = documents_in_chunks(begins, CHUNK, -begins.shape[1] % CHUNK)
    before, last = within.unsqueeze(-1), apart[:, :, -1, :, None, None]
    return later | apart[:, :, None, None], before, last, before[:, :, -1:]


def _states(added: Tensor, stays: Tensor) -> Tensor:
    """The state that each chunk begins with, as what chunks add.

    `added` is [b, chunks, groups, state, heads of each, head_dim], the part of a state that stays
    in a chunk fp32 [b, chunks, groups, 1, heads of each].
    """
    state, found = torch.zeros_like(added[:, 0], dtype=stays.dtype), []
    for new, part in zip(added.unbind(1), stays.unbind(1), strict=True):
        found.append(state.to(added.dtype))
        state = torch.addcmul(new, part.unsqueeze(-1), state)
    return torch.stack(found, dim=1)


def _chunked(x: Tensor) -> Tensor:
    """[b, s, ...] as [b, chunks, CHUNK, ...], the last chunk filled up with zeros."""
    if missing := -x.shape[1] % CHUNK:
        x = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, missing))
    return torch.unflatten(x, 1, (-1, CHUNK))


def _gated_and_normed(
    space: StateSpace, norm: Norm, gates: Tensor, x: Tensor, weight: Tensor | None = None
) -> Tensor:
    """X [b, s, .] times the SiLU of gates, normed by `weight` where the state space has a norm.

    Ranks have parts of a group or whole ones.
    """
    if space.scales:
        gates = gates * space.scales[0]
    shared = space.groups == 1 and not norm.ranks.alone
    groups = 1 if shared else space.groups // norm.ranks.group.size
    if weight is not None and norm.kernels is not None and not shared:
        return GatedNorm.apply(groups, norm.epsilon, x, gates, weight)  # type: ignore[no-any-return, no-untyped-call]
    if norm.kernels is None:
        x = x * F.silu(gates)
    else:
        x = generated.activation(norm.kernels, "swiglu", gates, x)
    if weight is None:
        return x
    if shared:
        return wide_norm(x, weight, RmsRule(norm.epsilon), norm.ranks.group)
    parts = wide(torch.unflatten(x, -1, (groups, -1)))
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + norm.epsilon)
    return (normed.flatten(2) * wide(weight)).to(x.dtype)


class GatedNorm(Function):
    """The same by a kernel, where no other rank has a part of a group."""

    @staticmethod
    def forward(
        ctx: Any, groups: int, epsilon: float, x: Tensor, gates: Tensor, weight: Tensor
    ) -> Tensor:
        from bigplan.kernels.handwritten import gated_norm

        ctx.sizes = groups, epsilon
        ctx.save_for_backward(x, gates, weight)
        return gated_norm.forward(x, gates, weight, groups, epsilon)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        from bigplan.kernels.handwritten import gated_norm

        found = gated_norm.backward(gradients[0].contiguous(), *ctx.saved_tensors, *ctx.sizes)
        asked = ctx.needs_input_grad[2:]
        return None, None, *(x if a else None for x, a in zip(found, asked, strict=True))
