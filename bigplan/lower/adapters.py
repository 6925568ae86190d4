"""A stage's adapters, where the model is frozen: one flat tensor of them stays on its GPU.

Each block's forward reads it, and each backward adds to its sum of gradients. The first backward of
a step begins the sum, of all adapters at once. After the last one ranks sum it, and the GPU updates
all adapters together: at once, or before the next step's first forward if updates wait for a norm.
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.content import ADAPTERS
from bigplan.lower.layout import StageLayout
from bigplan.lower.refs import ADAPTER_GRADIENTS as GRADIENTS
from bigplan.lower.refs import ADAPTER_SQUARES as SQUARES
from bigplan.lower.refs import ADAPTER_STATE as STATE
from bigplan.lower.refs import ADAPTER_WEIGHTS as WEIGHTS
from bigplan.lower.refs import CLIP, checkpoint_entry
from bigplan.mechanics import STAGING
from bigplan.placement import Share, Tier
from bigplan.program import Action, Buffer, Lane, Op


def adapter_buffers(layout: StageLayout) -> Iterator[Buffer]:
    """Adapters, their gradients and their state on the GPU, and the square sum."""
    elements, sizes = layout.adapters.elements, layout.graph.sizes
    if not elements:
        return
    for ref, nbytes in (
        (WEIGHTS, elements * sizes.parameter),
        (GRADIENTS, elements * sizes.gradient),
        (STATE, sizes.state_bytes(elements)),
    ):
        if nbytes:
            name, home = ref.buffer, ref.content
            yield Buffer(name, Tier.GPU, nbytes, "adapters", home_of=home, whole=True)
    yield Buffer(SQUARES.buffer, Tier.HOST, 8, "staging")


def sum_adapters(layout: StageLayout) -> Iterator[Action]:
    """After the stage's last backward: gradients are summed over ranks, and their norm taken."""
    adapters, graph = layout.adapters, layout.graph
    if not adapters.elements:
        return
    both = ((GRADIENTS,), (GRADIENTS,))
    if repeated := sum(len(part) for _, part in adapters.repeated):
        nbytes = repeated * graph.sizes.gradient
        yield Action(Op.TENSOR_REDUCE, Lane.COMPUTE, ADAPTERS, *both, amount=nbytes)
    if graph.strategy.shards > 1:
        alone = adapters.whole_experts if graph.strategy.ep == graph.strategy.shards else 0
        nbytes = (adapters.elements - alone) * graph.sizes.gradient
        yield Action(Op.REDUCE, Lane.COMM, ADAPTERS, *both, amount=nbytes)
    if graph.deferred:
        nbytes = adapters.elements * graph.sizes.gradient
        move = ((GRADIENTS,), (SQUARES,))
        yield Action(Op.NORM, Lane.GPU_UPDATE, ADAPTERS, *move, amount=nbytes)


def update_adapters(layout: StageLayout) -> Iterator[Action]:
    """The GPU updates all adapters of the stage; their gradients are consumed."""
    elements = layout.adapters.elements
    if not elements:
        return
    kept = (STATE,) if layout.graph.sizes.state else ()
    clip = (CLIP,) if layout.graph.deferred else ()
    reads, writes = (WEIGHTS, GRADIENTS, *kept, *clip), (WEIGHTS, *kept)
    move = (reads, writes)
    yield Action(Op.UPDATE, Lane.COMPUTE, ADAPTERS, *move, amount=elements, share=Share.GPU)
    yield Action(Op.FREE, Lane.COMPUTE, ADAPTERS, frees=(GRADIENTS,))


def save_adapters(layout: StageLayout) -> Iterator[Action]:
    """Write their state to a checkpoint, and themselves where no master copy is in the state."""
    adapters, sizes, strategy = layout.adapters, layout.graph.sizes, layout.graph.strategy
    if not adapters.elements:
        return
    # Of experts that are spread over ranks these have as many parts.
    elements = adapters.elements + (strategy.ep - 1) * adapters.whole_experts
    written = [] if sizes.master else [(WEIGHTS, elements * sizes.parameter)]
    written += [(STATE, sizes.state_bytes(elements))] if sizes.state else []
    staged = tuple(checkpoint_entry(ADAPTERS, entry) for entry in range(STAGING))
    for source, amount in written:
        nbytes = -(-amount // strategy.shards)  # ranks share the writing
        share = source.content.share
        yield Action(
            Op.CKPT, Lane.CHECKPOINT, ADAPTERS, (source,), staged, amount=nbytes, share=share
        )
