"""The gated delta rule in chunks of tokens, forward and backward: kernels written by hand.

Plain torch (runtime/mixers/delta_rule.py, which has the formulas) runs it in fp32, one small
product after the other. Here a chunk and a head are a program where chunks do not wait for each
other, and only the states walk from chunk to chunk, some columns of them in each program (Yang et
al., arXiv 2406.06484, section 3, and 2412.06464, section 3.3):

  filtered   queries, keys and values out of their convolution (short_filters.py)
  solved     W and U of a chunk, by the inverse of its triangular system
  walked     states before each chunk, and V' = U - W S in place of U
  read       O = exp(c) Q S + (Q K^T L) V'
  normed     O normed and gated, head by head (delta_rule_norms.py)

The backward runs all but the last again, and keeps the inverses as well. Then it has gradients by
the norm and the gate, and by O, in its place:

  unread       by what a chunk's own V', Q and K gave O
  walked_back  by states, from the last chunk on, and by all of V', which are U's
  unsolved     by U and W, hence by values, keys and the inverse
  uninverted   by the system, hence by keys, rates and decays
  filtered     by queries, keys and values, where value heads are added up

Factors of products are in the compute dtype, their sums and all else in fp32; the inverse is in
tf32. No sum depends on the order in which programs end: the same bits every time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bigplan.kernels.handwritten import delta_rule_backward, delta_rule_programs
from bigplan.kernels.handwritten.delta_rule_norms import normed, normed_backward
from bigplan.kernels.handwritten.short_filters import Heads, Taps, filtered, filtered_backward
from bigplan.mechanics import RULE_CHUNK as C
from bigplan.spec.mixers import GatedDeltaRule


class Launch(NamedTuple):
    """How a kernel is launched."""

    warps: int
    stages: int = 3
    columns: int = 32  # of values at a time; of a program that walks: all that it has
    registers: int | None = None  # of a thread; None: as many as the compiler likes

    @property
    def options(self) -> dict[str, int | None]:
        """As Triton names them."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


LAUNCHES = {
    "solved": Launch(4, 1, columns=64, registers=168),
    "walked": Launch(4),
    "read": Launch(4, 1, columns=64),
    "unread": Launch(4, 2, columns=64),
    "walked_back": Launch(4),
    "unsolved": Launch(4, 1, columns=64),
    "uninverted": Launch(4, 1, columns=64),
}


class Inputs(NamedTuple):
    """As runtime/mixers/delta_rule.py's `gated` takes them, contiguous."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    gates: Tensor
    rates: Tensor
    decays: Tensor
    query_filters: Tensor
    key_filters: Tensor
    value_filters: Tensor
    log_decay: Tensor
    offset: Tensor
    weight: Tensor


class How(NamedTuple):
    """What else `gated` takes."""

    rule: GatedDeltaRule
    epsilon: float
    begins: Tensor | None = None  # the first token of each token's document, int32 [b, s]


class _Walked(NamedTuple):
    """What the forward makes on its way, by delta_rule_programs.py's names."""

    q: Tensor
    k: Tensor
    v: Tensor
    own: Tensor
    old: Tensor
    inverse: Tensor
    rate: Tensor
    reach: Tensor
    states: Tensor


class _Sizes(NamedTuple):
    rule: GatedDeltaRule
    heads: int  # a rank's value heads
    length: int
    batch: int

    @classmethod
    def of(cls, rule: GatedDeltaRule, inputs: Inputs) -> _Sizes:
        batch, length, heads = inputs.rates.shape
        return cls(rule, heads, length, batch)

    @property
    def chunks(self) -> int:
        return -(-self.length // C)

    @property
    def numbers(self) -> dict[str, int]:
        return {
            "length": self.length,
            "heads": self.heads,
            "EACH": self.rule.value_heads_per_key,
            "KEYS": self.rule.key_dim,
            "VALUES": self.rule.value_dim,
            "C": C,
        }


def _run(kernel: Any, sizes: _Sizes, *tensors: Tensor | float, **constants: int) -> None:
    """Of each chunk, head and sequence a program."""
    how, grid = LAUNCHES[kernel.__name__], (sizes.chunks, sizes.heads, sizes.batch)
    constants |= {"PARTS": -(-sizes.rule.key_dim // how.columns), "BLOCK": how.columns}
    kernel[grid](*tensors, **sizes.numbers, **constants, **how.options)


def _walk(kernel: Any, sizes: _Sizes, *tensors: Tensor) -> None:
    """Of some columns of each head's state and sequence."""
    how, width = LAUNCHES[kernel.__name__], sizes.rule.value_dim
    grid = (width // how.columns, sizes.heads, sizes.batch)
    rows = triton.next_power_of_2(sizes.rule.key_dim)
    kernel[grid](*tensors, **sizes.numbers, K=rows, BLOCK=how.columns, **how.options)


def forward(how: How, *inputs: Tensor) -> Tensor:
    """As runtime/mixers/delta_rule.py's `gated`, of contiguous inputs with 16 bits."""
    given, sizes = Inputs(*inputs), _Sizes.of(how.rule, Inputs(*inputs))
    assert all(x.is_contiguous() for x in inputs)
    made = _walked(sizes, how, given, keep=False)
    out = _read(sizes, made)
    del made
    return normed(out, given.gates, given.weight, how.epsilon)


def _vectors(rule: GatedDeltaRule) -> tuple[Heads, Heads, Heads]:
    """Queries, keys and values, as their convolution leaves them."""
    return Heads(rule.key_dim, rule.key_dim**-0.5), Heads(rule.key_dim, 1.0), Heads(rule.value_dim)


def _walked(sizes: _Sizes, how: How, given: Inputs, *, keep: bool) -> _Walked:
    rule, batch, length, heads = sizes.rule, sizes.batch, sizes.length, sizes.heads
    q, k, v = (
        filtered(x, Taps(filters, begins=how.begins), each)
        for x, filters, each in zip(given[:3], given[6:9], _vectors(rule), strict=True)
    )
    own, old = torch.empty_like(v), v.new_empty(batch, length, heads * rule.key_dim)
    inverse = v.new_empty(batch, length, heads * C) if keep else v
    rate, reach = (v.new_empty(batch, heads, length, dtype=torch.float32) for _ in range(2))
    states = v.new_empty(batch, heads, sizes.chunks, rule.key_dim, rule.value_dim)
    apart = how.begins is not None
    _run(
        delta_rule_programs.solved, sizes, k, v, given.rates, given.decays, given.log_decay,
        given.offset, rate if how.begins is None else how.begins, own, old, inverse, rate, reach,
        rule.rate_scale, KEEP=keep, DOCUMENTS=apart, DOUBLINGS=C.bit_length() - 1,
    )  # fmt: skip
    _walk(delta_rule_programs.walked, sizes, k, own, old, reach, states)
    return _Walked(q, k, v, own, old, inverse, rate, reach, states)


def _read(sizes: _Sizes, made: _Walked) -> Tensor:
    out = torch.empty_like(made.own)
    _run(delta_rule_programs.read, sizes, made.q, made.k, made.own, made.states, made.reach, out)
    return out


def backward(
    how: How, gradient: Tensor, asked: tuple[bool, ...], *inputs: Tensor
) -> list[Tensor | None]:
    """Gradients by all inputs that are asked for, of that by what `forward` gives."""
    given, sizes = Inputs(*inputs), _Sizes.of(how.rule, Inputs(*inputs))
    made = _walked(sizes, how, given, keep=True)
    heads, others = _by_heads(sizes, how, given, made, gradient.contiguous())
    del made
    found = [
        filtered_backward(by_head, x, Taps(filters, begins=how.begins), each, asked=wanted)
        for by_head, x, filters, each, wanted in zip(
            heads, given[:3], given[6:9], _vectors(how.rule), asked[6:9], strict=True
        )
    ]
    by_vectors, by_filters = zip(*found, strict=True)
    every = (*by_vectors, *others[:3], *by_filters, *others[3:])
    return [x if wanted else None for x, wanted in zip(every, asked, strict=True)]


def _by_heads(
    sizes: _Sizes, how: How, given: Inputs, made: _Walked, gradient: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """By queries, keys and values of each value head; and by gates and all after, but filters."""
    by_read, by_gates, by_weight = normed_backward(
        gradient, _read(sizes, made), given.gates, given.weight, how.epsilon
    )
    by_own, by_v = (torch.empty_like(made.own) for _ in range(2))
    by_q, by_k = torch.empty_like(made.old), torch.empty_like(made.old)
    by_reach, by_states = torch.empty_like(made.reach), torch.empty_like(made.states)
    by_rates, by_decays = torch.empty_like(given.rates), torch.empty_like(given.decays)
    by_scalars = made.reach.new_empty(sizes.batch, sizes.heads, sizes.chunks, 2)
    _run(
        delta_rule_backward.unread, sizes, made.q, made.k, made.own, made.states, made.reach,
        by_read, by_own, by_q, by_k, by_reach,
    )  # fmt: skip
    _walk(
        delta_rule_backward.walked_back, sizes, made.q, made.k, made.old, made.reach, by_read,
        by_own, by_states,
    )  # fmt: skip
    by_rate, by_inverse = torch.empty_like(made.rate), torch.empty_like(made.inverse)
    _run(
        delta_rule_backward.unsolved, sizes, made.k, made.v, made.own, made.inverse, made.rate,
        made.reach, made.states, by_states, by_own, by_k, by_reach, by_v, by_rate, by_inverse,
    )  # fmt: skip
    _run(
        delta_rule_backward.uninverted, sizes, made.k, given.rates, given.decays, given.log_decay,
        given.offset, made.inverse, made.rate, made.reach, by_inverse, by_rate, by_reach, by_k,
        by_rates, by_decays, by_scalars, how.rule.rate_scale,
    )  # fmt: skip
    by_log_decay, by_offset = by_scalars.sum((0, 2)).to(given.offset.dtype).unbind(-1)
    return (by_q, by_k, by_v), (by_gates, by_rates, by_decays, by_log_decay, by_offset, by_weight)
