"""A table that the first and the last layer share, where they are on two stages.

The first stage owns the table: parameters, gradients and state are those of its layer, counted,
stored and updated once. The last stage borrows a copy of the parameters at the beginning of each
step and each evaluation. It sums its own gradients of the table in a buffer of its own, and hands
the sum back behind its last message. So both stages have the same bits whatever updates them. Both
messages have the time in which a pipeline fills or drains.
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.lower.layout import StageLayout
from bigplan.lower.refs import borrowed_gradients, gradient_home, parameter_home, returned_gradients
from bigplan.placement import Tier
from bigplan.program import Action, Buffer, Lane, Op


def table_buffers(layout: StageLayout) -> Iterator[Buffer]:
    """The copy on the last stage's GPU, and the first stage's buffer for returned gradients."""
    elements, sizes = layout.kind(0).parameters, layout.graph.sizes
    parameters, gradients = elements * sizes.parameter, elements * sizes.gradient
    if layout.position.borrows:
        name = parameter_home(0).buffer
        yield Buffer(name, Tier.GPU, parameters, "parameters", whole=True)
    if layout.graph.frozen:
        return
    if layout.position.borrows:
        name = borrowed_gradients().buffer
        yield Buffer(name, Tier.GPU, gradients, "gradients", whole=True)
    if layout.position.lends:
        name = returned_gradients().buffer
        yield Buffer(name, Tier.GPU, gradients, "gradients", whole=True)


def lend(layout: StageLayout) -> Iterator[Action]:
    """Send the updated parameters to the last stage."""
    if layout.position.lends:
        nbytes = layout.kind(0).parameters * layout.graph.sizes.parameter
        yield Action(Op.SEND, Lane.SEND, 0, reads=(parameter_home(0),), amount=nbytes)


def borrow(layout: StageLayout) -> Iterator[Action]:
    """Receive the parameters before any hidden state."""
    if layout.position.borrows:
        nbytes = layout.kind(0).parameters * layout.graph.sizes.parameter
        yield Action(Op.RECV, Lane.RECV, 0, writes=(parameter_home(0),), amount=nbytes)


def hand_back(layout: StageLayout) -> Iterator[Action]:
    """Send the last stage's sum of gradients when its backward passes have ended."""
    if layout.position.borrows and not layout.graph.frozen:
        ref, nbytes = borrowed_gradients(), layout.kind(0).parameters * layout.graph.sizes.gradient
        yield Action(Op.SEND, Lane.SEND, 0, reads=(ref,), frees=(ref,), amount=nbytes)


def take_back(layout: StageLayout) -> Iterator[Action]:
    """Receive the sum behind the last hidden state's gradient, and add it to the first stage's."""
    if layout.position.lends and not layout.graph.frozen:
        ref, home = returned_gradients(), gradient_home(0)
        nbytes = layout.kind(0).parameters * layout.graph.sizes.gradient
        yield Action(Op.RECV, Lane.RECV, 0, writes=(ref,), amount=nbytes)
        yield Action(Op.ACCUMULATE, Lane.COMPUTE, 0, (ref, home), (home,), (ref,), amount=nbytes)
