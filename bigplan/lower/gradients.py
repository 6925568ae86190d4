"""A unit's gradients of one layer on their way home: reduced, moved, summed, squared."""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.content import Content
from bigplan.lower.layout import StageLayout
from bigplan.lower.refs import gradient_home, partial_gradients, square_sum
from bigplan.lower.sizes import gradient_bytes, owned_gradient_bytes, reduced_bytes
from bigplan.lower.unit import AccumulationGroup
from bigplan.placement import Tier
from bigplan.program import Action, Lane, Op, Ref


def bring_home(
    layout: StageLayout, layer: int, total: Ref, unit: AccumulationGroup
) -> Iterator[Action]:
    """Actions after the unit's last backward of `layer`, whose gradients are summed in `total`.

    Gradients that leave the GPU, or are sharded (ZeRO-2, 3), are reduced in every unit; those that
    stay whole are reduced once, when they are final. With zero groups a rank's part is then summed
    over the groups: once, when it is final, if it stays on the GPU.
    """
    apart, ranks = layout.sums_apart(layer), layout.graph.strategy.shards
    at, home = layout.table[layer].gradients, gradient_home(layer)
    if ranks > 1 and (apart or unit.last):
        nbytes = reduced_bytes(layout, layer)
        yield Action(Op.REDUCE, Lane.COMM, layer, (total,), (total,), amount=nbytes)
        if not apart or at is not Tier.GPU:
            yield from _sum_replicas(layout, layer, total)
    if layout.looked_up(layer):  # the rows of each micro-batch went home before
        yield from _norm(layout, layer, home, Lane.CPU, unit)
    elif not apart:
        yield from _norm(layout, layer, total, Lane.GPU_UPDATE, unit)
    elif at is Tier.GPU:  # a ZeRO shard that stays on the GPU is added to its home
        yield Action(
            Op.ACCUMULATE,
            Lane.COMPUTE,
            layer,
            (total,) if unit.first else (total, home),
            (home,),
            (total,),
            amount=gradient_bytes(layout, layer),
        )
        if unit.last:
            yield from _sum_replicas(layout, layer, home)
        yield from _norm(layout, layer, home, Lane.GPU_UPDATE, unit)
    elif unit.first:
        yield from _first_out(layout, layer, total, unit)
    else:
        yield from _add_out(layout, layer, total, unit)


def _sum_replicas(layout: StageLayout, layer: int, gradients: Ref) -> Iterator[Action]:
    """Sum what this rank owns of a layer's gradients over the zero groups, if there are several."""
    if layout.graph.strategy.zero_group:
        nbytes, both = owned_gradient_bytes(layout, layer), (gradients,)
        yield Action(Op.SUM_REPLICAS, Lane.COMM, layer, both, both, amount=nbytes)


def sum_repeated(
    layout: StageLayout, layer: int, total: Ref, unit: AccumulationGroup
) -> Iterator[Action]:
    """After the unit's last backward, sum gradients of parameters that several tensor ranks hold.

    Gradients that stay on the GPU are summed once, others in every unit, as in their reduction. The
    sum uses the lane of the layers' own collectives, because both share a communicator.
    """
    elements = sum(len(part) for _, part in layout.kind(layer).repeated)
    if elements and (layout.sums_apart(layer) or unit.last):
        nbytes = elements * layout.graph.sizes.gradient
        yield Action(Op.TENSOR_REDUCE, Lane.COMPUTE, layer, (total,), (total,), amount=nbytes)


def _norm(
    layout: StageLayout, layer: int, gradients: Ref, lane: Lane, unit: AccumulationGroup
) -> Iterator[Action]:
    """The square sum of gradients that are now final, where updates wait for their norm.

    On the GPU this runs beside the next layer's backward, because it reads memory while the
    backward computes.
    """
    if unit.last and layout.graph.deferred:
        nbytes, target = owned_gradient_bytes(layout, layer), square_sum(layer)
        yield Action(Op.NORM, lane, layer, (gradients,), (target,), amount=nbytes)


def staged_gradient(layout: StageLayout, layer: int, content: Content, entry: int) -> Ref:
    """A host staging entry for the layer's gradients, or a unit's part of them."""
    return Ref(f"stage.g.{layout.graph.layers[layer]}", content, entry)


def _first_out(
    layout: StageLayout, layer: int, total: Ref, unit: AccumulationGroup
) -> Iterator[Action]:
    """The first unit's gradients go straight home."""
    nbytes, home = gradient_bytes(layout, layer), gradient_home(layer)
    yield from _norm(layout, layer, total, Lane.GPU_UPDATE, unit)
    on_host = layout.table[layer].gradients is Tier.HOST
    target = (
        home
        if on_host
        else staged_gradient(layout, layer, home.content, layout.turns["stage.g"][layer])
    )
    yield Action(Op.GRAD_OUT, Lane.D2H, layer, (total,), (target,), (total,), amount=nbytes)
    if not on_host:
        yield Action(Op.WRITE, Lane.NVME_WRITE, layer, (target,), (home,), (target,), amount=nbytes)


def _add_out(
    layout: StageLayout, layer: int, total: Ref, unit: AccumulationGroup
) -> Iterator[Action]:
    """Later units' gradients are added to their sum in host memory."""
    nbytes, home = gradient_bytes(layout, layer), gradient_home(layer)
    at, index = layout.table[layer].gradients, layout.turns["stage.g"][layer]
    part = staged_gradient(layout, layer, partial_gradients(layer), index)
    yield Action(Op.GRAD_OUT, Lane.D2H, layer, (total,), (part,), (total,), amount=nbytes)
    target = home
    if at is Tier.NVME:
        target = staged_gradient(layout, layer, home.content, index + 1)
        yield Action(Op.READ, Lane.NVME_READ, layer, (home,), (target,), amount=nbytes)
    yield Action(Op.ACCUMULATE, Lane.CPU, layer, (part, target), (target,), (part,), amount=nbytes)
    yield from _norm(layout, layer, target, Lane.CPU, unit)
    if at is Tier.NVME:
        yield Action(Op.WRITE, Lane.NVME_WRITE, layer, (target,), (home,), (target,), amount=nbytes)
