"""What the formulation says a tier holds is what the program allocates there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from bigplan.graph.strategy import Strategy
from bigplan.lower.entries import streaming_bytes, streaming_entries
from bigplan.mechanics import CHUNK_STAGING, PAGE
from bigplan.placement import Rings, Tier
from bigplan.program import Buffer, Program
from bigplan.solve.decisions import decisions_of
from bigplan.solve.formulation import formulate
from bigplan.solve.linear import Capacity
from bigplan.solve.stage import StageClass, stage_classes
from bigplan.spec.sharing import NodeSharing
from bigplan.verify import verify
from tests.examples import examples
from tests.toys import (
    COSTS,
    ROOMY,
    Case,
    cases,
    kind_placement,
    muon_cases,
    placed,
    rows_moved,
    toy_graph,
    with_capacity,
)


@settings(max_examples=examples(150))
@given(cases())
def test_rows_are_the_bytes_the_program_allocates(case: Case) -> None:
    _check_rows(case)


@settings(max_examples=examples(40))
@given(muon_cases())
def test_rows_are_those_bytes_with_muon(case: Case) -> None:
    """Also where elements of a layer have unlike state, and the ring's entries are whole layers.

    Programs keep every rule.
    """
    verify(case.programs, case.graph, ROOMY, NodeSharing(1))
    _check_rows(case)


def _check_rows(case: Case) -> None:
    values = decisions_of(case.graph, case.placement)
    programs = case.programs
    problem = formulate(case.graph, case.costs, Rings.of(case.placement))
    classes = {stage.name: stage for stage in stage_classes(case.graph)}
    assert len(problem.capacities) == len(classes) * len(Tier)
    for row in problem.capacities:
        stage = classes[row.stage]
        program = programs[stage.stages[0]]
        allocated = program.bytes_by_tier()[row.tier]
        # The class's later stages hold fewer activations.
        later = [programs[i].bytes_by_tier()[row.tier] for i in stage.stages]
        assert max(later) == allocated
        expected = row.used.at(values) + _rounding(case, stage, program, row)
        if row.tier is Tier.NVME:  # whole pages, and chunks one row of the widest tensor longer
            chunks = sum(b.count for b in _chunks(program))
            widest = 4 * _state(case)
            assert expected - 1e-6 <= allocated <= expected + chunks * (widest + PAGE)
        elif row.tier is Tier.HOST and _without_gradients(case, stage):
            assert allocated <= expected + 1e-5
        else:
            # Products of floats: shares and GiB round by 1e-16 of the bytes they stand for.
            assert allocated == pytest.approx(expected, rel=1e-12, abs=1e-5)


def test_page_tables_of_host_memory_are_the_gpus() -> None:
    """Its row grows by as much for each byte of the host's, and so does what plans may use."""
    costs = replace(COSTS, page_tables=0.25, sharing=NodeSharing(2))
    graph = toy_graph()
    placement = placed(graph, block=kind_placement(4, optimizer=Tier.HOST))
    values = decisions_of(graph, placement)
    plain, found = (
        {
            row.tier: row.used.at(values)
            for row in formulate(graph, each, Rings.of(placement)).capacities
        }
        for each in (replace(costs, page_tables=0.0), costs)
    )
    assert plain[Tier.HOST] == found[Tier.HOST] > 0
    assert found[Tier.GPU] - plain[Tier.GPU] == pytest.approx(0.25 * found[Tier.HOST] / 2)
    left = costs.beside(round(found[Tier.HOST] / 2))[Tier.GPU]
    assert left == pytest.approx(costs.capacity[Tier.GPU] - 0.25 * found[Tier.HOST] / 2, abs=1)


def _without_gradients(case: Case, stage: StageClass) -> bool:
    """Whether more layers' activations than gradients are in host memory.

    Then it depends on the layers' order whether what stays in a ring could lie in their place.
    """
    kinds = case.placement.stages[stage.stages[0]].kinds.values()
    away = [
        (sum(tiers.get(Tier.HOST, 0) for tiers in kind.activations.values()), kind.gradients)
        for kind in kinds
    ]
    return case.graph.units == 1 and any(n > g.get(Tier.HOST, 0) for n, g in away)


def _state(case: Case) -> int:
    """Bytes of an element's state that may be cut: with Muon, of what AdamW updates."""
    return case.graph.sizes.state + case.graph.sizes.second


def _chunks(program: Program) -> list[Buffer]:
    return [b for b in program.buffers.values() if b.name.endswith(".nvme")]


def _rounding(case: Case, stage: StageClass, program: Program, row: Capacity) -> float:
    """Bytes by which whole rows and whole rings exceed the row's linear terms, exactly."""
    tier, first = row.tier, stage.stages[0]
    surplus = rows_moved(case, first, tier) * _state(case)
    kinds = case.placement.stages[first].kinds
    on_disk = any(rows.optimizer.get(Tier.NVME, 0.0) > 1e-9 for rows in kinds.values())
    if tier is Tier.HOST and on_disk and "stage.o" not in program.buffers:
        # A share on NVMe of less than a row needs no chunks in host memory.
        widest = 4 * _state(case)
        surplus -= CHUNK_STAGING * -(-(case.placement.chunk + widest) // PAGE) * PAGE
    streamed = any(rows.streamed > 1e-9 for rows in kinds.values())
    if tier is Tier.GPU and streamed and "stream" not in program.buffers:  # likewise
        surplus -= streaming_entries(case.graph) * streaming_bytes(case.graph)
    return surplus


def test_node_tiers_count_every_rank() -> None:
    graph = toy_graph(Strategy(dp=4))
    away = placed(graph, block=kind_placement(4, Tier.HOST, Tier.HOST, optimizer=Tier.HOST))
    values = decisions_of(graph, away)
    used = {}
    for ranks in (1, 4):
        costs = with_capacity(replace(COSTS, sharing=NodeSharing(ranks)), gpu=10, host=20, nvme=30)
        rows = formulate(graph, costs).capacities
        assert [row.limit for row in rows] == [10, 20, 30]
        used[ranks] = {row.tier: row.used.at(values) for row in rows}
    assert used[4][Tier.GPU] == used[1][Tier.GPU]
    assert used[4][Tier.HOST] == 4 * used[1][Tier.HOST]
