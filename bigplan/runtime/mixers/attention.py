"""Attention between a block's first norm and its last product, by the kernel that its scores need.

Queries, keys and values are made of x or of narrow latents, normed and turned. Beside it stand what
other blocks have in its place: convolution.py, delta_rule.py and state_space.py.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bigplan.mechanics import repeats_heads
from bigplan.runtime import generated
from bigplan.runtime.attention import alibi, capped, isolated, latent, narrow_values, sinks
from bigplan.runtime.attention.fused import attention
from bigplan.runtime.attention.in_blocks import Scores
from bigplan.runtime.attention.latent import How
from bigplan.runtime.mixers.gated_heads import gated_by, heads_of
from bigplan.runtime.mixers.norms import norm_of, normed_whole, rms_normed, rms_rule
from bigplan.runtime.mixers.positions import Positions
from bigplan.runtime.mixers.ways import Parameters, Ways, keep
from bigplan.runtime.operators import rotary
from bigplan.spec.carried import KEYS, VALUES
from bigplan.spec.layers import SINKS
from bigplan.spec.model import ModelSpec


def mixed(
    p: Parameters,
    x: Tensor,
    model: ModelSpec,
    positions: Positions,
    ways: Ways,
) -> Tensor:
    """Causal attention of x [b, s, h] with grouped key and value heads, before o_proj."""
    tables, attends, bounds = positions
    made = _latent_heads if model.latent_attention else _grouped_heads
    made = _queries_alone if model.keys_given else made
    q, k, v, *gates = made(p, x, model, positions, ways)
    if ways.hand_on is not None:
        k, v = ways.hand_on(k, v)
    q, k, v = map(ways.context.whole_sequences, (q, k, v))
    if repeats_heads(x.element_size(), model.heads, model.kv_heads):
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    length = q.shape[1]
    within, window = attends.within(length)
    if within < length:
        bounds = None if bounds is None else _bounds_in_chunks(bounds, within)
        q, k, v = (x.reshape(-1, within, *x.shape[2:]) for x in (q, k, v))
    by_kernel = ways.kernels is not None
    own = ways.context.own_heads(p[SINKS]) if model.attention_sinks else None
    if bounds is not None:
        slopes = alibi.Biases(*tables).slopes if model.positions == "alibi" else None
        scores = Scores(model.scale_of_scores, model.score_cap, window, slopes, bounds)
        output = isolated.attention((q, k, v), scores, own, generated=by_kernel)
    elif model.positions == "alibi":
        biases = alibi.Biases(*tables)
        output = alibi.attention(q, k, v, biases, window, generated=by_kernel)
    elif model.score_cap is not None:
        scores = Scores(model.scale_of_scores, model.score_cap, window)
        output = capped.attention(q, k, v, scores, generated=by_kernel)
    elif own is not None:
        scale = model.scale_of_scores
        output = sinks.attention((q, k, v), own, window, scale, generated=by_kernel)
    elif model.latent_attention is not None:
        output = narrow_values.attention(q, k, v, model.scale_of_scores)
    else:
        output = attention(q, k, v, window, model.score_scale, generated=by_kernel)
    output = output.reshape(-1, length, *output.shape[2:])  # chunks beside each other again
    output = ways.context.own_tokens(output).flatten(2)
    return gated_by(gates[0], output, ways.forget) if gates else output


def _bounds_in_chunks(bounds: Tensor, length: int) -> Tensor:
    """Bounds of documents int32 [b, 2, s], as chunks of so many tokens have them: [b n, 2, s / n].

    A document that begins or ends in another chunk does so at the edge of this one.
    """
    chunks = bounds.view(len(bounds), 2, -1, length).transpose(1, 2)  # [b, n, 2, length]
    starts = torch.arange(chunks.shape[1], device=bounds.device, dtype=bounds.dtype) * length
    return (chunks - starts[:, None, None]).clamp(0, length).flatten(0, 1)


def _latent_heads(
    p: Parameters, x: Tensor, model: ModelSpec, positions: Positions, ways: Ways
) -> tuple[Tensor, ...]:
    """Those of latent attention, whose latents have norms of their own."""

    def norm(name: str, narrow: Tensor) -> Tensor:
        return norm_of(p, name, narrow, model.of_latents, ways)[0]

    again = (ways.again, ways.forget) if ways.again else None
    how = How(ways.linears, ways.whole, norm, again, by_kernel=ways.kernels is not None)
    return latent.heads(p, x, model, positions.tables, how)


def _grouped_heads(
    p: Parameters, x: Tensor, model: ModelSpec, positions: Positions, ways: Ways
) -> tuple[Tensor, ...]:
    """Queries, keys and values [b, s, heads, head_dim] of x, normed and turned; a gate if any."""
    tables, attends = positions.tables, positions.attends
    # Linear biases are for whole sequences, other tables for the tokens that this rank has.
    parts = ways.context.group.size if model.positions == "alibi" else 1
    shape = len(tables[0]) // parts, model.head_dim
    q, *gates = ways.linears(p, heads_of(model), x)
    k, v = (gates.pop(), None) if model.keys_as_values else (gates.pop(-2), gates.pop())
    if model.qk_norm_whole:
        q = normed_whole(p, "q_norm", q, model, ways)
        k = normed_whole(p, "k_norm", k, model, ways)
    q, k = (_heads(y, *shape) for y in (q, k))
    k, v = _keys_and_values(p, k, k if v is None else _heads(v, *shape), model, ways)
    if not model.qk_norm_turned:
        q, k = _normed_heads(p, q, k, model, ways)
    if attends.rope_theta is not None:
        turned = rotary if ways.kernels is None else partial(generated.rotary, ways.kernels)
        q, k = turned(q, *tables[-2:]), turned(k, *tables[:2])
    elif attends.growth is not None and len(tables) > 2:  # queries grow
        q = q * tables[2][:, None, None]
    if model.qk_norm_turned and (
        attends.rope_theta is not None or model.weightless_norms == "none"
    ):
        q, k = _normed_heads(p, q, k, model, ways)
    return q, k, v, *gates


def _queries_alone(
    p: Parameters, x: Tensor, model: ModelSpec, positions: Positions, ways: Ways
) -> tuple[Tensor, ...]:
    """Queries of x, normed and turned, and the keys and values that an earlier block has made."""
    tables, attends = positions.tables, positions.attends
    (q,) = ways.linears(p, ("q_proj",), x)
    q = _heads(q, len(tables[0]), model.head_dim)
    if model.qk_norm:
        q = rms_normed(q, p.get("q_norm.weight"), rms_rule(model), ways.kernels)
    if attends.rope_theta is not None:
        turned = rotary if ways.kernels is None else partial(generated.rotary, ways.kernels)
        q = turned(q, *tables[-2:])
    return q, p[KEYS], p[VALUES]


def _keys_and_values(
    p: Parameters, k: Tensor, v: Tensor, model: ModelSpec, ways: Ways
) -> tuple[Tensor, Tensor]:
    """Keys, and values [b, s, heads, head_dim] by their norm, where the model has one.

    If both are one tensor, the norm's backward adds the gradient by keys to its own.
    """
    if not model.value_norm:
        return k, v
    normed, given = norm_of(p, "v_norm", v, model, ways._replace(forget=keep))
    return (given if v is k else k), normed


def _normed_heads(
    p: Parameters, q: Tensor, k: Tensor, model: ModelSpec, ways: Ways
) -> tuple[Tensor, Tensor]:
    """Queries and keys [b, s, heads, head_dim] by norms of each head, where the model has them."""
    if not model.qk_norm or model.qk_norm_whole:
        return q, k
    rule = rms_rule(model)
    q = rms_normed(q, p.get("q_norm.weight"), rule, ways.kernels)
    return q, rms_normed(k, p.get("k_norm.weight"), rule, ways.kernels)


def _heads(x: Tensor, length: int, head_dim: int) -> Tensor:
    """[..., heads * head_dim], the tokens of sequences of so many, as [b, s, heads, head_dim]."""
    heads = x.shape[-1] // head_dim
    return x.view(-1, length, heads, head_dim)
