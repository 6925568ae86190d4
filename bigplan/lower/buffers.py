"""The buffers of one stage: what is allocated on every tier for the whole run.

Buffers, by name (l: layer, k: layer kind):

    w{l} g{l} a{l}       home of parameters, gradients, activations (an entry per micro-batch)
    o{l}.gpu .host       optimizer state that is updated in its home
    o{l}.streamed .nvme  optimizer state that passes, chunk by chunk, the GPU or host memory
    slot.{k} shard.{k}   GPU rings for parameters that live elsewhere, and for their ZeRO-3 shards
    {w,g,o,n}.adapters   the same of a stage's adapters
    w0 g0, g0.back       on the last stage, a borrowed table and its gradients; on the first
                         stage, these gradients when they come back
    sum.{k}              GPU ring that sums gradients with their home elsewhere
    act.{k}.{recompute}  GPU ring for activations with their home elsewhere
    stage.w.{k} .g .a, stage.o   host rings between the GPU or the CPU and NVMe
    rows stage.r         GPU and host rings for rows of tables and for their gradients
    stream               GPU ring for state that lives in host memory
    stage.c              host ring that checkpoints are written and read through
    data                 host ring of tokens and targets
    documents            where documents are in a step's sequences, if they are kept apart
    workspace graphs     what a pass makes and drops, and the same of captured passes
    muon                 what Muon's update of a layer makes and drops
    h d                  hidden states and their gradients between layers
"""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.graph.muon import workspace
from bigplan.lower.adapters import adapter_buffers
from bigplan.lower.entries import (
    checkpoint_staging,
    data_staging,
    looked_up_bytes,
    staged_chunk_bytes,
    streaming_bytes,
    streaming_entries,
)
from bigplan.lower.layout import StageLayout
from bigplan.lower.refs import gradient_home, kept, parameter_home, state_home
from bigplan.lower.sizes import (
    full_gradient_bytes,
    full_parameter_bytes,
    gradient_bytes,
    hidden_bytes,
    kept_bytes,
    owned_gradient_bytes,
    owned_parameter_bytes,
    parameter_bytes,
    updaters,
)
from bigplan.lower.table import table_buffers
from bigplan.mechanics import CHUNK_STAGING, GRAPH_BYTES, PAGE, STAGING
from bigplan.placement import IN_CHUNKS, Share, Tier
from bigplan.program import DOCUMENTS, ROWS, STAGED_ROWS, Buffer
from bigplan.spec.layers import BLOCKS


def stage_buffers(layout: StageLayout) -> dict[str, Buffer]:
    """Every buffer of a stage, by name."""
    buffers: dict[str, Buffer] = {}
    for buffer in (
        *_homes(layout),
        *table_buffers(layout),
        *adapter_buffers(layout),
        *_rings(layout),
        *_hidden(layout),
    ):
        other = buffers.get(
            buffer.name
        )  # the ends of the model share a slot as large as the larger
        if other is None or buffer.nbytes > other.nbytes:
            buffers[buffer.name] = buffer
    return buffers


def _homes(layout: StageLayout) -> Iterator[Buffer]:
    for layer, at in layout.table.items():
        nbytes, apart = parameter_bytes(layout, layer), updaters(layout, layer)
        home, whole = parameter_home(layer).content, not layout.shards(layer, from_zero=3)
        yield Buffer(
            f"w{layer}", at.parameters, nbytes, "parameters", 1, apart, home_of=home, whole=whole
        )
        nbytes, home = gradient_bytes(layout, layer), gradient_home(layer).content
        whole = not layout.shards(layer, from_zero=2)
        if at.gradients is not None:
            yield Buffer(f"g{layer}", at.gradients, nbytes, "gradients", home_of=home, whole=whole)
        for share in Share:
            elements, count = layout.pieces[layer, share], 1
            if share in IN_CHUNKS and elements:
                count = layout.chunks(layer, share)
                elements = min(elements, -(-elements // count) + layout.kind(layer).unit)
            nbytes = layout.graph.state_bytes(layout.kind(layer), elements)
            if share is Share.NVME:
                nbytes = -(-nbytes // PAGE) * PAGE
            if nbytes:
                name, home = f"o{layer}.{share}", state_home(layer, share).content
                yield Buffer(name, share.tier, nbytes, "optimizer", count, home_of=home)
        if layout.stays(layer):
            continue
        entries, nbytes = layout.position.held(layer), kept_bytes(layout, layer)
        within = f"g{layer}" if layout.kept_in_gradients(layer) else ""
        yield Buffer(
            f"a{layer}",
            at.activations,
            nbytes,
            "activations",
            entries,
            within=within,
            home_of=kept(layer).content,
            dynamic=at.activations is Tier.GPU,
            live=layout.position.live(layer) if at.activations is Tier.GPU else None,
        )


def _rings(layout: StageLayout) -> Iterator[Buffer]:
    names = dict.fromkeys(layout.graph.layers[layer] for layer in layout.table)
    for name in names:
        layers = [layer for layer in layout.table if layout.graph.layers[layer] == name]
        yield from _weight_rings(layout, name, layers)
        yield from _gradient_rings(layout, name, layers)
        yield from _activation_rings(layout, layers)
    if any(layout.pieces[layer, Share.NVME] for layer in layout.table):
        yield Buffer(
            "stage.o",
            Tier.HOST,
            staged_chunk_bytes(layout.graph, layout.chunk),
            "staging",
            CHUNK_STAGING,
        )
    if any(layout.pieces[layer, Share.STREAMED] for layer in layout.table):
        nbytes = streaming_bytes(layout.graph, layout.chunk)
        yield Buffer("stream", Tier.GPU, nbytes, "slots", streaming_entries(layout.graph))
    if any(layout.looked_up(layer) for layer in layout.table):
        nbytes = looked_up_bytes(layout.graph)
        yield Buffer(ROWS, Tier.GPU, nbytes, "slots", STAGING)
        yield Buffer(STAGED_ROWS, Tier.HOST, nbytes, "staging", STAGING)
    yield Buffer("stage.c", Tier.HOST, checkpoint_staging(layout.graph), "staging", STAGING)


def _weight_rings(layout: StageLayout, name: str, layers: list[int]) -> Iterator[Buffer]:
    count, table = layout.rings.slots_of(name), layout.table
    if any(layout.visits(layer) for layer in layers):
        nbytes = full_parameter_bytes(layout, layers[0])
        yield Buffer(
            f"slot.{layout.rings.shared(name)}", Tier.GPU, nbytes, "slots", count, whole=True
        )
    if any(table[layer].visits and layout.shards(layer, from_zero=3) for layer in layers):
        yield Buffer(f"shard.{name}", Tier.GPU, parameter_bytes(layout, layers[0]), "slots", count)
    if any(layout.stages_weights(layer) for layer in layers):
        nbytes = owned_parameter_bytes(layout, layers[0])
        yield Buffer(f"stage.w.{name}", Tier.HOST, nbytes, "staging", STAGING)


def _gradient_rings(layout: StageLayout, name: str, layers: list[int]) -> Iterator[Buffer]:
    if any(layout.sums_apart(layer) for layer in layers):
        nbytes = full_gradient_bytes(layout, layers[0])
        ring, count = layout.rings.shared(name), layout.rings.sums_of(name)
        yield Buffer(f"sum.{ring}", Tier.GPU, nbytes, "slots", count, whole=True)
    if any(layout.stages_gradients(layer) for layer in layers):
        nbytes = owned_gradient_bytes(layout, layers[0])
        yield Buffer(f"stage.g.{name}", Tier.HOST, nbytes, "staging", STAGING)


def _workspaces(layout: StageLayout) -> Iterator[Buffer]:
    """Room for what a pass makes and drops; captured passes have a pool of memory of their own."""
    graphs, others = [0], [0]
    for layer, at in layout.table.items():
        captured = layout.captured and layout.graph.layers[layer] in BLOCKS
        (graphs if captured else others).append(layout.kind(layer).workspace(at.recompute))
    yield Buffer("workspace", Tier.GPU, max(others), "workspace", dynamic=True)
    if nbytes := workspace(layout.graph):
        yield Buffer("muon", Tier.GPU, nbytes, "workspace", dynamic=True)
    if layout.captured:
        graphs_bytes = GRAPH_BYTES * layout.graph.passes(len(graphs) - 1)
        yield Buffer("graphs", Tier.GPU, max(graphs) + graphs_bytes, "workspace", dynamic=True)


def _activation_rings(layout: StageLayout, layers: list[int]) -> Iterator[Buffer]:
    """One ring of each sort for every way to keep activations, so that an entry fits every user."""
    for layer in layers:
        name, nbytes = layout.keeps(layer), kept_bytes(layout, layer)
        if layout.table[layer].activations is not Tier.GPU:
            yield Buffer(f"act.{name}", Tier.GPU, nbytes, "slots", layout.rings.slots, dynamic=True)
        if layout.table[layer].activations is Tier.NVME:
            yield Buffer(f"stage.a.{name}", Tier.HOST, nbytes, "staging", STAGING)


def _hidden(layout: StageLayout) -> Iterator[Buffer]:
    strategy = layout.graph.strategy
    nbytes = hidden_bytes(layout)
    # A pipeline stage receives the next unit's micro-batches while it works on the current unit.
    count = strategy.accumulation_group * (1 if strategy.pp == 1 else 2)
    yield Buffer("h", Tier.GPU, nbytes, "activations", count, dynamic=True)
    if strategy.pp > 1:
        yield Buffer("d", Tier.GPU, nbytes, "activations", count, dynamic=True)
    if layout.graph.carried and layout.position.stage:  # the first stage's embedding keeps it
        held = layout.position.held(min(layout.table))
        nbytes = layout.graph.carried
        yield Buffer("carried", Tier.GPU, nbytes, "activations", held, dynamic=True)
    if layout.position.takes_batch is not None:
        yield Buffer("data", Tier.HOST, data_staging(layout.graph)[0], "staging", count)
    if layout.graph.document_bytes:
        yield Buffer(DOCUMENTS, Tier.GPU, layout.graph.document_bytes, "activations")
    yield from _workspaces(layout)
    for layer in layout.table:
        if not layout.kind(layer).frozen:
            yield Buffer(f"n{layer}", Tier.HOST, 8, "staging")
    yield Buffer("clip", Tier.HOST, 8, "staging")
