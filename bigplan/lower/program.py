"""The pipeline schedule of a stage: its passes in order, steady parts as repeat blocks."""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.graph.graph import Graph
from bigplan.lower.buffers import stage_buffers
from bigplan.lower.layout import Layout
from bigplan.lower.passes import Emitter
from bigplan.lower.unit import Unit
from bigplan.lower.update import update_layer
from bigplan.placement import Placement
from bigplan.program import Action, Instruction, Lane, Op, Program, Ref, Repeat


def lower(graph: Graph, placement: Placement) -> tuple[Program, ...]:
    """One program per pipeline stage; the ranks of a stage all run the same one."""
    return tuple(lower_stage(graph, placement, stage) for stage in range(graph.strategy.pp))


def lower_steady(graph: Graph, placement: Placement) -> tuple[Program, ...]:
    """The programs with their steady step alone: all that memory and simulation ask for."""
    layouts = [Layout.of(graph, placement, stage) for stage in range(graph.strategy.pp)]
    return tuple(
        Program(
            stage=layout.stage,
            buffers=stage_buffers(layout),
            layers=layout.table,
            first=(),
            step=tuple(_step(layout, deferred=graph.clipped)),
            flush=(),
        )
        for layout in layouts
    )


def lower_stage(graph: Graph, placement: Placement, stage: int) -> Program:
    """The program of the ranks of `stage`."""
    layout = Layout.of(graph, placement, stage)
    flush: tuple[Instruction, ...] = ()
    if graph.clipped:
        flush = tuple(action for layer in layout.table for action in update_layer(layout, layer))
    return Program(
        stage=stage,
        buffers=stage_buffers(layout),
        layers=layout.table,
        first=tuple(_step(layout, deferred=False)),
        step=tuple(_step(layout, deferred=graph.clipped)),
        flush=flush,
    )


def _step(layout: Layout, *, deferred: bool) -> Iterator[Instruction]:
    clipped = layout.graph.clipped
    emitter = Emitter(layout, deferred=deferred)
    yield from _one_forward_one_backward(layout, emitter)
    yield from emitter.release()
    if clipped:
        squares = tuple(Ref(f"n{layer}", f"n{layer}") for layer in layout.table)
        yield Action(Op.CLIP, Lane.CPU, max(layout.table), squares, (Ref("clip", "clip"),))


def _one_forward_one_backward(layout: Layout, emitter: Emitter) -> Iterator[Instruction]:
    """1F1B over units: fill the stages after this one, alternate, drain."""
    units = layout.graph.units
    group = layout.graph.strategy.accumulation_group
    fill = layout.graph.in_flight_units(layout.stage)
    pairs, drain = units - fill, fill - 1

    yield from emitter.forward(Unit(0, first=True, last=units == 1))
    yield from _repeat(fill - 1, group, emitter.forward(Unit(group)))
    yield from emitter.backward(Unit(0, first=True, last=units == 1))
    whole = pairs - 1 if drain == 0 and pairs > 0 else pairs
    if whole > 0:
        pair = [*emitter.forward(Unit(fill * group)), *emitter.backward(Unit(group))]
        yield from _repeat(whole, group, iter(pair))
    if whole < pairs:
        yield from emitter.forward(Unit((units - 1) * group, last=True))
        yield from emitter.backward(Unit((units - 1) * group, last=True))
    if drain > 0:
        if drain > 1:
            yield from _repeat(drain - 1, group, emitter.backward(Unit((pairs + 1) * group)))
        yield from emitter.backward(Unit((units - 1) * group, last=True))


def _repeat(count: int, stride: int, body: Iterator[Instruction]) -> Iterator[Instruction]:
    if count > 0:
        yield Repeat(count, stride, tuple(body))
