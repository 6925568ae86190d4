from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bigplan.graph.graph import Recompute, Tensor
from bigplan.graph.strategy import Strategy
from bigplan.layer_placement import LayerPlacement, layer_table, pieces, spread_order, stage_table
from bigplan.placement import KindPlacement, Share, Tier
from tests.toys import Case, cases, kind_placement, kind_placements, placed, toy_graph, toy_kind


@pytest.mark.parametrize("count", [*range(1, 18), 31, 32, 40])
def test_every_prefix_of_the_order_is_spread(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    bits = max(1, (count - 1).bit_length())
    for chosen in range(1, count + 1):
        for end in range(1, count + 1):
            # The discrepancy of a van der Corput sequence grows by at most one a binary digit.
            inside = sum(layer < end for layer in order[:chosen])
            assert abs(inside - chosen * end / count) <= bits
    halves = [layer < count / 2 for layer in order]
    assert halves[:2] in ([True], [True, False])


@given(st.data(), st.integers(1, 9))
def test_the_table_has_the_counts_and_nests_what_is_on_the_gpu(data: st.DataObject, n: int) -> None:
    graph = toy_graph(blocks=n)
    placement = data.draw(kind_placements(graph, "block", n))
    table = layer_table(placement)
    for tier in Tier:
        assert sum(at.parameters is tier for at in table) == placement.parameters[tier]
        assert sum(at.gradients is tier for at in table) == placement.gradients[tier]
        for recompute in Recompute:
            alike = sum(at.recompute is recompute and at.activations is tier for at in table)
            assert alike == placement.activations[recompute][tier]
        share = sum(at.rows[share] for at in table for share in Share if share.tier is tier)
        assert share == pytest.approx(placement.optimizer[tier], abs=1e-9)  # sums of fractions
    streamed = sum(at.rows[Share.STREAMED] for at in table)
    assert streamed == pytest.approx(placement.streamed, abs=1e-9)
    both = sum(at.parameters is at.gradients is Tier.GPU for at in table)
    assert both == min(placement.parameters[Tier.GPU], placement.gradients[Tier.GPU])
    both = sum(at.gradients is at.activations is Tier.HOST for at in table)
    on_host = sum(at.activations is Tier.HOST for at in table)
    assert both == min(placement.gradients[Tier.HOST], on_host)
    for at in table:
        assert at.visits == (at.parameters is not Tier.GPU)
        if at.rows[Share.GPU] > 0:
            assert at.parameters is at.gradients is Tier.GPU
        if at.rows[Share.STREAMED] > 0:
            assert Tier.NVME not in (at.parameters, at.gradients)


@given(
    st.integers(1, 300),
    st.integers(1, 5),
    st.lists(st.integers(0, 12), min_size=4, max_size=4).filter(sum),
)
def test_what_a_rank_owns_is_cut_at_whole_units_and_in_order(
    rows: int, ranks: int, parts: list[int]
) -> None:
    fractions = {share: part / sum(parts) for share, part in zip(Share, parts, strict=True)}
    at = LayerPlacement(Tier.GPU, Tier.GPU, Recompute.NONE, Tier.GPU, fractions)
    kind = replace(toy_kind("block"), tensors=(Tensor("w", rows, 12),))
    owned = kind.owned(ranks)
    assert kind.unit == 4
    assert kind.parameters <= ranks * owned < kind.parameters + (4 * ranks if ranks > 1 else 1)
    cut = pieces(kind, at, ranks)
    assert [element for share in Share for element in cut[share]] == list(range(owned))
    for share in Share:
        assert cut[share].start % 4 == 0
        assert abs(len(cut[share]) - fractions[share] * owned) <= 4 + 1e-6
        if fractions[share] == 0:
            assert len(cut[share]) == 0


@given(cases())
def test_pieces_are_the_layer(case: Case) -> None:
    for stage in range(case.graph.strategy.pp):
        table = stage_table(case.graph, case.placement, stage)
        assert list(table) == list(case.graph.stage_layers(stage))
        for layer, at in table.items():
            kind = case.graph.kinds[case.graph.layers[layer]]
            trained = 0 if kind.frozen else kind.parameters
            assert sum(map(len, pieces(kind, at, 1).values())) == trained


def test_stage_table_takes_each_stage_from_its_own_row() -> None:
    graph = toy_graph(Strategy(dp=1, pp=2), blocks=4)
    placement = placed(graph, block=kind_placement(2, Tier.HOST, optimizer=Tier.HOST))
    tiers = Counter(at.parameters for at in stage_table(graph, placement, 1).values())
    assert tiers == {Tier.HOST: 2, Tier.GPU: 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": {Tier.GPU: 1}}, "parameters places 1 of 2 layers; place each once"),
        ({"gradients": {Tier.HOST: 3}}, "gradients places 3 of 2 layers"),
        ({"activations": {Recompute.NONE: {}}}, "activations places 0 of 2 layers"),
        ({"optimizer": {Tier.HOST: 1.5}}, "optimizer places 1.5 of 2 layers; counts are >= 0"),
        ({"optimizer": {Tier.HOST: 3.0, Tier.GPU: -1.0}}, "optimizer places 2 of 2 layers"),
        (
            {"parameters": {Tier.GPU: 1, Tier.HOST: 1}},
            "optimizer.gpu is 2 layers, but only 1 keep parameters and gradients on the GPU",
        ),
        (
            {"streamed": 0.5},
            "streamed is 0.5 layers, but only 0 have their optimizer state in host",
        ),
        (
            {"optimizer": {Tier.HOST: 2.0}, "parameters": {Tier.NVME: 2}, "streamed": 1.0},
            "streamed and optimizer.gpu are 1 layers, but 2 of 2 keep parameters or gradients on",
        ),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"speed": 1}, "Extra inputs are not permitted"),
    ],
)
def test_impossible_placements_are_refused(change: dict[str, Any], message: str) -> None:
    valid = kind_placement(2).model_dump()
    assert KindPlacement.model_validate(valid) == kind_placement(2)
    with pytest.raises(ValidationError) as error:
        KindPlacement.model_validate(valid | change)
    assert message in str(error.value)


@pytest.mark.parametrize("streamed", [0.0, 5e-6])
def test_a_solvers_noise_of_streamed_layers_streams_none_that_the_gpu_holds(
    streamed: float,
) -> None:
    placement = kind_placement(2).model_copy(update={"streamed": streamed})
    for at in layer_table(placement):
        assert at.rows == {share: float(share is Share.GPU) for share in Share}


def test_what_is_on_the_gpu_does_not_move() -> None:
    still = KindPlacement.on_gpu(3)
    assert not still.moves
    away: tuple[dict[str, object], ...] = (
        {"parameters": {Tier.GPU: 2, Tier.HOST: 1}, "optimizer": {Tier.GPU: 2.0, Tier.HOST: 1.0}},
        {"optimizer": {Tier.GPU: 2.5, Tier.NVME: 0.5}},
        {"activations": {Recompute.FULL: {Tier.HOST: 3}}},
    )
    assert all(still.model_copy(update=change).moves for change in away)
