"""A unit's gradients of one layer on their way home: reduced, moved, summed, squared."""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.lower.layout import Layout
from bigplan.lower.sizes import full_gradient_bytes, gradient_bytes
from bigplan.lower.unit import Unit
from bigplan.placement import Tier
from bigplan.program import Action, Lane, Op, Ref


def gradient_home(layout: Layout, layer: int, total: Ref, unit: Unit) -> Iterator[Action]:
    """Actions after the unit's last backward of `layer`, whose gradients are summed in `total`.

    Gradients that leave the GPU, or are sharded (ZeRO-2, 3), are reduced in every unit; those that
    stay whole are reduced once, when they are final.
    """
    apart, dp = layout.sums_apart(layer), layout.graph.strategy.dp
    if dp > 1 and (apart or unit.last):
        nbytes = full_gradient_bytes(layout, layer)
        yield Action(Op.REDUCE, Lane.COMM, layer, (total,), (total,), amount=nbytes)
    home = Ref(f"g{layer}", f"g{layer}")
    at = layout.table[layer].gradients
    if layout.looked_up(layer):  # each micro-batch's rows went home by themselves
        yield from _norm(layout, layer, home, Lane.CPU, unit)
    elif not apart:
        yield from _norm(layout, layer, total, Lane.GPU_UPDATE, unit)
    elif at is Tier.GPU:  # a ZeRO shard that stays: add it to its home
        yield Action(
            Op.ACCUMULATE,
            Lane.COMPUTE,
            layer,
            (total,) if unit.first else (total, home),
            (home,),
            (total,),
            amount=gradient_bytes(layout, layer),
        )
        yield from _norm(layout, layer, home, Lane.GPU_UPDATE, unit)
    elif unit.first:
        yield from _first_out(layout, layer, total, unit)
    else:
        yield from _add_out(layout, layer, total, unit)


def _norm(layout: Layout, layer: int, gradients: Ref, lane: Lane, unit: Unit) -> Iterator[Action]:
    """The square sum of gradients that are now final, where updates wait for their norm.

    On the GPU beside the next layer's backward: it reads memory while that computes.
    """
    if unit.last and layout.graph.deferred:
        square_sum = Ref(f"n{layer}", f"n{layer}")
        nbytes = gradient_bytes(layout, layer)
        yield Action(Op.NORM, lane, layer, (gradients,), (square_sum,), amount=nbytes)


def staged_gradient(layout: Layout, layer: int, label: str, entry: int) -> Ref:
    """A host staging entry for the layer's gradients."""
    return Ref(f"stage.g.{layout.graph.layers[layer]}", label, entry)


def _first_out(layout: Layout, layer: int, total: Ref, unit: Unit) -> Iterator[Action]:
    """The first unit's gradients go straight home."""
    nbytes, home = gradient_bytes(layout, layer), Ref(f"g{layer}", f"g{layer}")
    yield from _norm(layout, layer, total, Lane.GPU_UPDATE, unit)
    on_host = layout.table[layer].gradients is Tier.HOST
    target = (
        home
        if on_host
        else staged_gradient(layout, layer, f"g{layer}", layout.turns["stage.g"][layer])
    )
    yield Action(Op.GRAD_OUT, Lane.D2H, layer, (total,), (target,), (total,), amount=nbytes)
    if not on_host:
        yield Action(Op.WRITE, Lane.NVME_WRITE, layer, (target,), (home,), (target,), amount=nbytes)


def _add_out(layout: Layout, layer: int, total: Ref, unit: Unit) -> Iterator[Action]:
    """Later units' gradients are added to their sum in host memory."""
    nbytes, home = gradient_bytes(layout, layer), Ref(f"g{layer}", f"g{layer}")
    at, index = layout.table[layer].gradients, layout.turns["stage.g"][layer]
    part = staged_gradient(layout, layer, f"p{layer}", index)
    yield Action(Op.GRAD_OUT, Lane.D2H, layer, (total,), (part,), (total,), amount=nbytes)
    target = home
    if at is Tier.NVME:
        target = staged_gradient(layout, layer, f"g{layer}", index + 1)
        yield Action(Op.READ, Lane.NVME_READ, layer, (home,), (target,), amount=nbytes)
    yield Action(Op.ACCUMULATE, Lane.CPU, layer, (part, target), (target,), (part,), amount=nbytes)
    yield from _norm(layout, layer, target, Lane.CPU, unit)
    if at is Tier.NVME:
        yield Action(Op.WRITE, Lane.NVME_WRITE, layer, (target,), (home,), (target,), amount=nbytes)
