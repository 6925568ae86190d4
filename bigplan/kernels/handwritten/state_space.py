"""A state space (Mamba-2) in chunks of tokens, forward and backward: kernels written by hand.

Plain torch (runtime/mixers/state_space.py, which has the formulas) writes scores of each head and
chunk, and all else between its products. Here a program has a chunk and some heads of a group,
which share scores; only the states walk from chunk to chunk, a part of a head's in each program
(Dao and Gu, arXiv 2405.21060, section 6):

  filtered   values, keys and queries out of their convolution (short_filters.py)
  stepped    time steps, and the sums of decays within each chunk
  walked     states before each chunk
  read       Y, and D x

The backward begins with what these made:

  walked_back  by states, from the last chunk on
  ungiven      by what a chunk's tokens give each other and the state
  unasked      by what they ask of the state
  unstepped    by time steps
  filtered     by values, keys and queries, where programs of a group are added up

Factors of products are in the compute dtype, their sums and all else in fp32. No sum depends on the
order in which programs end: the same bits every time.
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigplan.kernels.handwritten import state_space_backward, state_space_programs
from bigplan.kernels.handwritten.short_filters import Heads, Taps, filtered, filtered_backward
from bigplan.mechanics import SPACE_CHUNK as C
from bigplan.mechanics import space_heads_together
from bigplan.spec.mixers import StateSpace

STEPPED_HEADS = 16  # of a program


class Launch(NamedTuple):
    """How a kernel is launched."""

    warps: int
    stages: int = 3
    part: tuple[int, int] = (64, 64)  # of a head's state, in a program that walks

    @property
    def options(self) -> dict[str, int]:
        """As Triton names them."""
        return {"num_warps": self.warps, "num_stages": self.stages}


LAUNCHES = {
    "stepped": Launch(4),
    "walked": Launch(4),
    "read": Launch(4),
    "walked_back": Launch(4),
    "ungiven": Launch(4, 1),
    "unasked": Launch(4, 2),
    "unstepped": Launch(4),
}


class Inputs(NamedTuple):
    """As runtime/mixers/state_space.py's `gated` takes them but gates and the norm, contiguous."""

    vectors: tuple[Tensor, ...]  # values, keys and queries
    times: Tensor
    log_decay: Tensor
    offset: Tensor
    skip: Tensor
    taps: tuple[Taps, ...]

    @classmethod
    def of(cls, inputs: tuple[Tensor, ...]) -> Inputs:
        """Filters of values, keys and queries come last, then their biases if any."""
        *vectors, times, log_decay, offset, skip = inputs[:7]
        taps = tuple(map(Taps, inputs[7:10], inputs[10:] or (None,) * 3))
        return cls(tuple(vectors), times, log_decay, offset, skip, taps)


class Made(NamedTuple):
    """What the forward makes on its way, by state_space_programs.py's names."""

    v: Tensor
    k: Tensor
    q: Tensor
    steps: Tensor
    reach: Tensor
    states: Tensor


class _Sizes(NamedTuple):
    space: StateSpace
    batch: int
    length: int
    heads: int  # of this rank
    groups: int

    @classmethod
    def of(cls, space: StateSpace, inputs: Inputs) -> _Sizes:
        batch, length, heads = inputs.times.shape
        return cls(space, batch, length, heads, inputs.vectors[1].shape[-1] // space.state)

    @property
    def chunks(self) -> int:
        return -(-self.length // C)

    @property
    def together(self) -> int:
        return space_heads_together(self.heads // self.groups)

    @property
    def limits(self) -> tuple[float, float]:
        most = self.space.most_step
        return self.space.least_step, inf if most is None else most

    @property
    def numbers(self) -> dict[str, int]:
        return {
            "length": self.length,
            "heads": self.heads,
            "EACH": self.heads // self.groups,
            "KEYS": self.space.state,
            "VALUES": self.space.head_dim,
            "C": C,
        }

    @property
    def vectors(self) -> tuple[Heads, Heads, Heads]:
        """Values, keys and queries, as their convolution leaves them."""
        return Heads(self.space.head_dim), Heads(self.space.state), Heads(self.space.state)


def _run(kernel: Any, sizes: _Sizes, *tensors: Tensor | float) -> None:
    """Of each chunk, of some heads of a group, and of each sequence a program."""
    how = LAUNCHES[kernel.__name__]
    grid = (sizes.chunks, sizes.heads // sizes.together, sizes.batch)
    kernel[grid](*tensors, **sizes.numbers, TOGETHER=sizes.together, **how.options)


def _walk(kernel: Any, sizes: _Sizes, *tensors: Tensor) -> None:
    """Of a part of each head's state and of each sequence."""
    how, space = LAUNCHES[kernel.__name__], sizes.space
    rows, columns = min(how.part[0], space.state), min(how.part[1], space.head_dim)
    grid = (space.state // rows * (space.head_dim // columns), sizes.heads, sizes.batch)
    kernel[grid](*tensors, **sizes.numbers, ROWS=rows, COLUMNS=columns, **how.options)


def _step(kernel: Any, sizes: _Sizes, *tensors: Tensor | float) -> None:
    """Of each chunk, of some heads of any group, and of each sequence."""
    how = LAUNCHES[kernel.__name__]
    grid = (sizes.chunks, -(-sizes.heads // STEPPED_HEADS), sizes.batch)
    kernel[grid](*tensors, sizes.length, sizes.heads, BLOCK=STEPPED_HEADS, C=C, **how.options)


def forward(space: StateSpace, *inputs: Tensor) -> tuple[Tensor, Made]:
    """What heads read with D x, [b, s, heads * head_dim], and what the backward needs of it."""
    assert all(x.is_contiguous() for x in inputs)
    given = Inputs.of(inputs)
    sizes = _Sizes.of(space, given)
    v, k, q = (
        filtered(x, taps, heads)
        for x, taps, heads in zip(given.vectors, given.taps, sizes.vectors, strict=True)
    )
    batch, length, heads = given.times.shape
    steps, reach = (v.new_empty(batch, heads, length, dtype=torch.float32) for _ in range(2))
    _step(
        state_space_programs.stepped, sizes, given.times, given.log_decay, given.offset, steps,
        reach, *sizes.limits,
    )  # fmt: skip
    states = v.new_empty(batch, heads, sizes.chunks, space.state, space.head_dim)
    made, out = Made(v, k, q, steps, reach, states), torch.empty_like(v)
    _walk(state_space_programs.walked, sizes, k, v, steps, reach, states)
    _run(state_space_programs.read, sizes, q, k, v, steps, reach, states, given.skip, out)
    return out, made


def backward(
    space: StateSpace, gradient: Tensor, asked: tuple[bool, ...], made: Made, *inputs: Tensor
) -> list[Tensor | None]:
    """Gradients by all inputs that are asked for, of that by what `forward` gives."""
    given = Inputs.of(inputs)
    sizes, gradient = _Sizes.of(space, given), gradient.contiguous()
    by_states, by_v = torch.empty_like(made.states), torch.empty_like(made.v)
    columns = sizes.heads // sizes.together * space.state
    by_k, by_q = (gradient.new_empty(*gradient.shape[:2], columns) for _ in range(2))
    by_times, place = torch.empty_like(given.times), by_states.shape[:3]
    by_steps, by_reach = torch.empty_like(made.reach), torch.empty_like(made.reach)
    by_last, by_skip, by_scalars = (made.reach.new_empty(*place, *n) for n in ((), (), (2,)))
    _walk(state_space_backward.walked_back, sizes, made.q, gradient, made.reach, by_states)
    _run(
        state_space_backward.ungiven, sizes, made.q, made.k, made.v, made.steps, made.reach,
        given.skip, by_states, gradient, by_q, by_k, by_v, by_steps, by_reach, by_last, by_skip,
    )  # fmt: skip
    _run(
        state_space_backward.unasked, sizes, made.q, made.reach, made.states, by_states, gradient,
        by_q, by_reach, by_last,
    )  # fmt: skip
    del by_states
    _step(
        state_space_backward.unstepped, sizes, given.times, given.log_decay, given.offset,
        made.steps, by_steps, by_reach, by_last, by_times, by_scalars, *sizes.limits,
    )  # fmt: skip
    by_numbers = (*by_scalars.sum((0, 2)).unbind(-1), by_skip.sum((0, 2)))
    by_numbers = tuple(x.to(given.skip.dtype) for x in by_numbers)
    by_vectors, by_filters, by_biases = [], [], []
    for each, x in enumerate((by_v, by_k, by_q)):
        taps = given.taps[each]
        filters, bias, _ = taps
        wanted = asked[7 + each] or (bias is not None and asked[10 + each])
        vector, heads = given.vectors[each], sizes.vectors[each]
        by_x, by_own = filtered_backward(x, vector, taps, heads, asked=wanted)
        by_vectors.append(by_x)
        by_filters.append(None if by_own is None else by_own[:, : filters.shape[1]].contiguous())
        if bias is not None:
            by_biases.append(None if by_own is None else by_own[:, -1].contiguous())
    every = (*by_vectors, by_times, *by_numbers, *by_filters, *by_biases)
    return [x if wanted else None for x, wanted in zip(every, asked, strict=True)]
