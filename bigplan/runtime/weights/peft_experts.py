"""Adapters of experts as peft's tensors have them, and back (bigplan/spec/hf/peft_experts.py).

Here experts take turns in the rows of A and B, of which one is [f x experts, rank] and the other
[rank x experts, h] (bigplan/spec/lora.py). In peft's A [experts x width, in] the rows of an expert
are together, and in columns of its B [out, width x experts] experts take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from bigplan.spec.hf.peft_experts import ExpertPlace, SeparateExperts

Pair = tuple[Tensor, Tensor]  # A and B


def exported(pairs: Mapping[ExpertPlace, Pair], rank: int) -> Pair:
    """A and B of one parameter as peft has them, of its matrices' as bigplan has them."""
    place = next(iter(pairs))
    experts, hidden = place.matrix.experts, place.matrix.shape[1]
    inner = place.matrix.shape[0] // experts
    read, given = (inner, hidden) if place.returns else (hidden, inner // place.run * place.cycle)
    down = torch.zeros(experts, place.width, read)
    up = torch.zeros(given, place.width, experts)
    for one, (a, b) in pairs.items():
        columns = slice(one.first, one.first + rank)
        if one.returns:
            own_down = a.reshape(-1, experts, rank).permute(1, 2, 0)
            own_up = b.reshape(rank, experts, -1).permute(2, 0, 1)
        else:
            own_down = a.reshape(rank, experts, -1).transpose(0, 1)
            own_up = b.reshape(-1, experts, rank).transpose(1, 2)
        down[:, columns] = own_down
        _rows(one, up)[:, :, columns] = own_up.reshape(-1, one.run, rank, experts)
    return down.flatten(0, 1), up.flatten(1, 2)


def first_of(place: ExpertPlace, down: Tensor, rank: int) -> Tensor:
    """A matrix's A as bigplan has it, out of peft's."""
    every = down.view(place.matrix.experts, place.width, -1)
    own = every[:, place.first : place.first + rank]
    return own.permute(2, 0, 1) if place.returns else own.transpose(0, 1)


def last_of(place: ExpertPlace, up: Tensor, rank: int) -> Tensor:
    """A matrix's B as bigplan has it, out of peft's."""
    every = up.view(len(up), place.width, place.matrix.experts)
    own = _rows(place, every)[:, :, place.first : place.first + rank].flatten(0, 1)
    return own.permute(1, 2, 0) if place.returns else own.transpose(1, 2)


def together(place: SeparateExperts, each: Iterable[Tensor]) -> Tensor:
    """Every expert's A or B, as bigplan has them all: [rank or rows, experts x rank or columns]."""
    return torch.stack([one.T if place.returns else one for one in each], dim=1).flatten(1)


def goes_with_none(up: Tensor, places: Sequence[ExpertPlace], rank: int) -> bool:
    """Whether peft's B has values that are of none of these matrices."""
    own = sum(int(torch.count_nonzero(last_of(place, up, rank))) for place in places)
    return own != int(torch.count_nonzero(up))


def _rows(place: ExpertPlace, up: Tensor) -> Tensor:
    """The matrix's rows of B [out, width, experts], cycle by cycle: [cycles, run, width, experts].

    Writing to them writes to B.
    """
    cycles = up.view(-1, place.cycle, *up.shape[1:])
    return cycles[:, place.above : place.above + place.run]


def products(wide: Tensor, narrow: Tensor, rank: int, experts: int) -> Tensor:
    """B A of every expert, as its matrix is stored: [f x experts, h].

    `wide`: what is [f x experts, rank] of both; `narrow`: what is [rank x experts, h].
    """
    of_rows = wide.reshape(-1, experts, rank), narrow.reshape(rank, experts, -1)
    return torch.einsum("fer,reh->feh", *of_rows).flatten(0, 1)
