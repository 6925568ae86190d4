"""A stage's program: its buffers, and its passes in a first, a steady and a flushing part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from bigplan.graph.graph import Graph
from bigplan.lower.adapters import save_adapters, update_adapters
from bigplan.lower.buffers import stage_buffers
from bigplan.lower.checkpoint import checkpoint_layer
from bigplan.lower.layout import StageLayout
from bigplan.lower.passes import Emitter
from bigplan.lower.refs import ADAPTER_SQUARES, CLIP, square_sum
from bigplan.lower.schedule import forward_only, interleaved, one_forward_one_backward
from bigplan.lower.update import update_layer
from bigplan.placement import Placement
from bigplan.program import Action, Instruction, Lane, Op, Program


def lower(graph: Graph, placement: Placement) -> tuple[Program, ...]:
    """One program per pipeline stage; the ranks of a stage all run the same one."""
    return tuple(lower_stage(graph, placement, stage) for stage in range(graph.strategy.pp))


def lower_buffers(graph: Graph, placement: Placement) -> tuple[Program, ...]:
    """The programs without any action, which is enough for memory."""
    return tuple(map(_without_actions, _layouts(graph, placement)))


def lower_steady(
    graph: Graph, placement: Placement, fit: Callable[[Sequence[Program]], bool]
) -> tuple[Program, ...] | None:
    """The programs with their steady step alone, which is enough for memory and simulation.

    None where they do not `fit`. Their buffers say so, before any action is made.
    """
    layouts = _layouts(graph, placement)
    programs = tuple(map(_without_actions, layouts))
    return tuple(map(_steady, layouts, programs)) if fit(programs) else None


def _layouts(graph: Graph, placement: Placement) -> tuple[StageLayout, ...]:
    stages = range(graph.strategy.pp)
    return tuple(StageLayout.of(graph, placement, stage) for stage in stages)


def _without_actions(layout: StageLayout) -> Program:
    stage, buffers = layout.position.stage, stage_buffers(layout)
    return Program(stage, buffers, layers=layout.table, first=(), step=(), flush=())


def _steady(layout: StageLayout, program: Program) -> Program:
    return replace(program, step=tuple(_step(layout, deferred=layout.graph.deferred)))


def lower_stage(graph: Graph, placement: Placement, stage: int) -> Program:
    """The program of the ranks of `stage`."""
    layout = StageLayout.of(graph, placement, stage)
    flush: tuple[Instruction, ...] = ()
    if graph.deferred:
        trained = () if graph.frozen else layout.table
        flush = tuple(action for layer in trained for action in update_layer(layout, layer))
        flush += tuple(update_adapters(layout))
    return Program(
        stage=stage,
        buffers=stage_buffers(layout),
        layers=layout.table,
        first=tuple(_step(layout, deferred=False)),
        step=tuple(_step(layout, deferred=graph.deferred)),
        flush=flush,
        evaluate=tuple(_evaluation(layout)),
        checkpoint=tuple(_step(layout, deferred=graph.deferred, saves=True)),
        save=(
            *(action for layer in layout.table for action in checkpoint_layer(layout, layer)),
            *save_adapters(layout),
        ),
        captured=placement.captured,
    )


def _evaluation(layout: StageLayout) -> Iterator[Instruction]:
    emitter = Emitter(layout, deferred=False, evaluates=True)
    yield from forward_only(layout, emitter)
    yield from emitter.finish()


def _step(layout: StageLayout, *, deferred: bool, saves: bool = False) -> Iterator[Instruction]:
    clipped = layout.graph.deferred
    emitter = Emitter(layout, deferred=deferred, saves=saves)
    schedule = interleaved if layout.graph.strategy.vpp > 1 else one_forward_one_backward
    yield from schedule(layout, emitter)
    yield from emitter.finish()
    if clipped:
        squares = tuple(square_sum(layer) for layer in layout.table)
        if layout.graph.frozen:
            squares = (ADAPTER_SQUARES,) if layout.adapters.elements else ()
        yield Action(Op.CLIP, Lane.CPU, max(layout.table), squares, (CLIP,))
