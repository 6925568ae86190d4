"""What a rank's layers have learnt, whole: small models' digests, and what tests look at."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bigplan.content import ADAPTERS, Content, Holds
from bigplan.runtime.context import Context
from bigplan.runtime.memory.pieces import Owner
from bigplan.runtime.parallel.groups import Groups
from bigplan.runtime.weights.homes import load


def weights(context: Context) -> Iterator[tuple[int, Tensor]]:
    """The flat parameters of every layer of this rank's stage, on the CPU, in layer order.

    They are as a tensor-parallel rank has them. If data-parallel ranks share them out, a layer is
    brought together on the device, so all these ranks must call this.
    """
    dtype = context.parameter_dtype
    for layer in context.program.layers:
        elements = context.kind(layer).parameters
        values = load(context, Content(Holds.PARAMETERS, layer))
        if not context.entries.has_whole(layer):
            part = context.rows[layer].part.elements * dtype.itemsize
            values = _together(context, layer, values[:part])
        yield layer, values[: elements * dtype.itemsize].view(dtype)


def _together(context: Context, layer: int, mine: Tensor) -> Tensor:
    """The parts of all ranks that share a copy of the layer, uint8 [n], on the CPU."""
    group = context.groups.shard
    size = mine.numel() * group.size
    whole = torch.empty(size, dtype=torch.uint8, device=context.device)
    group.all_gather(whole, mine.to(context.device))
    kind, at = context.kind(layer), context.groups.at.data
    if kind.ep == 1:
        return whole.cpu()
    each = whole.cpu().view(group.size, -1)
    experts = context.rows[layer].part.ranges[0].elements * context.parameter_dtype.itemsize
    alike = each[at % kind.ep :: kind.ep]  # those with the same experts
    return torch.cat([alike[:, :experts].flatten(), each[:, experts:].flatten()])


def _as_described(context: Context, layer: int, mine: Tensor) -> Tensor:
    """A layer's parameters in the model's order, on the CPU, as all ranks have them together.

    These are the ranks that split its tensors: tensor-parallel ones, and those that spread experts.
    """
    group, found = context.groups.tensor, []
    every = group.gathered(mine.to(context.device))()
    owners = [Owner(tensor=rank, tp=group.size) for rank in range(group.size)]
    own = group.place
    if (ep := context.kind(layer).ep) > 1:
        spread = context.groups.expert
        every, own = spread.gathered(every)(), spread.place * group.size + own
        owners = [owner._replace(expert=place, ep=ep) for place in range(ep) for owner in owners]
    offsets = context.rows[layer].offsets
    each = every.cpu().view(len(owners), -1)
    ranks = sorted(range(len(owners)), key=lambda rank: rank == own)  # its own count
    for parameter in context.parameters(layer):
        start, whole = offsets[parameter.name][0], mine.new_empty(parameter.matrix)
        for rank in ranks:
            if part := owners[rank].holds(parameter):
                flat = each[rank][start : start + part.elements]
                whole[part.in_matrix] = flat.view(part.rows, -1)
        found.append(whole.flatten())
    return torch.cat([mine[:0], *found])  # a tied head without weights has none


def weights_digest(context: Context) -> str:
    """SHA-256 of the SHA-256 of every layer, in order, whichever ranks have it.

    If several ranks have a layer, each takes its own, so that ranks that differ show it. Of frozen
    layers their adapters alone.
    """
    mine = {
        layer: hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
        for layer, flat in (_adapters if context.graph.frozen else _layers)(context)
    }
    return digest_of_all(context.groups, mine)


def _layers(context: Context) -> Iterator[tuple[int, Tensor]]:
    for layer, flat in weights(context):
        yield layer, _as_described(context, layer, flat)


def _adapters(context: Context) -> Iterator[tuple[int, Tensor]]:
    """A layer's adapters behind each other, whole, for every layer of the stage that has some."""
    layers = [n for n in context.program.layers if context.kind(n).adapters]
    if layers:
        every = _as_described(context, ADAPTERS, stage_adapters(context))
        yield from zip(layers, every.chunk(len(layers)), strict=True)


def stage_adapters(context: Context) -> Tensor:
    """The stage's adapters, flat, as this rank has them, on the CPU."""
    dtype, elements = context.parameter_dtype, context.kind(ADAPTERS).parameters
    return load(context, Content(Holds.PARAMETERS, ADAPTERS))[: elements * dtype.itemsize].view(
        dtype
    )


def digest_of_all(groups: Groups, mine: Mapping[int, str]) -> str:
    """SHA-256 of the layers' own, in order; `mine`: those of this rank's layers."""
    every: dict[int, str] = {}
    for text in groups.texts_of_all(json.dumps(mine).encode()):
        every |= {int(layer): found for layer, found in json.loads(text).items()}
    every |= mine
    return hashlib.sha256("".join(every[layer] for layer in sorted(every)).encode()).hexdigest()
