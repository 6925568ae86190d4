from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings

from bigplan.errors import InputError
from bigplan.graph.graph import Recompute
from bigplan.graph.strategy import Strategy
from bigplan.placement import Rings, Tier
from bigplan.solve.decisions import decisions_of
from bigplan.solve.formulation import formulate, pinned, placement_of
from bigplan.solve.ilp import solve
from bigplan.solve.pins import POSITIVE, SWITCHES, Pin, parse_pins, pin_rules
from bigplan.solve.stage import stage_classes
from tests.examples import examples
from tests.toys import COSTS, Case, cases, kind_placement, placed, toy_graph


def test_what_can_be_pinned() -> None:
    strategy, pins = parse_pins(
        {
            "tp": 8,
            "zero": "3",
            "parameters": "host",
            "block.gradients.nvme": 5,
            "optimizer.host": "0.25",
            "recompute": "full",
            "block.recompute.none": 2.0,
            "activations.gpu": 1,
        }
    )
    assert strategy == {"tp": 8, "zero": 3}
    assert pins == (
        Pin(None, "parameters", "host", None),
        Pin("block", "gradients", "nvme", 5.0),
        Pin(None, "optimizer", "host", 0.25),
        Pin(None, "recompute", "full", None),
        Pin("block", "recompute", "none", 2.0),
        Pin(None, "activations", "gpu", 1.0),
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimiser", "host", "--set optimiser: no such decision; did you mean 'optimizer'?"),
        ("block.parameter", "host", "--set block.parameter: no such decision"),
        ("block.parameters.gpu.x", 1, "no such decision"),
        ("parameters", "disk", "--set parameters: 'disk' is not one of gpu, host, nvme"),
        ("recompute", "some", "--set recompute: 'some' is not one of none, selective, mlp, full"),
        ("parameters.ram", 1, "--set parameters.ram: 'ram' is not one of gpu, host, nvme"),
        ("tp", "two", "--set tp=two: write a number, such as 1"),
        ("tp", 1.5, "--set tp=1.5: write a whole number, such as tp=4"),
        ("dp", -1, "--set dp=-1: write a whole number"),
        ("zero", 4, "--set zero=4: ZeRO has stages up to 3"),
        ("replicas", 2, "--set replicas: no such decision"),
        ("captured", "maybe", "--set captured=maybe: write 0 or 1"),
        ("captured", -1, "--set captured=-1: write 0 or 1"),
        ("shared_ends", 0.5, "--set shared_ends=0.5: write 0 or 1"),
        ("parameters.gpu", 1.5, "write a whole number"),
        ("optimizer.gpu", "half", "write a number"),
        ("streamed", 2, "--set streamed=2: write a fraction from 0 to 1, such as 0.5"),
        ("optimizer.nvme", -0.5, "write a fraction from 0 to 1"),
        ("streamed", "host", "--set streamed=host: write a number"),
        ("streamed.host", 1.0, "streamed state is in host memory; write streamed=0.5"),
    ],
)
def test_what_cannot(key: str, value: str | float, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_pins({key: value})
    assert message in str(error.value)


def test_unknown_kinds_are_refused_where_the_kinds_are_known() -> None:
    (stage,) = stage_classes(toy_graph())
    with pytest.raises(InputError, match=r"no such layer kind \(kinds: embedding, block, head\)"):
        list(pin_rules(stage, (Pin("blok", "parameters", "host", None),)))


@pytest.mark.parametrize(
    ("tensor", "tier"), list(product(("parameters", "gradients", "optimizer"), Tier))
)
def test_a_pin_without_a_kind_holds_for_all_that_can_move(tensor: str, tier: Tier) -> None:
    graph = toy_graph(tied=True)
    pins = parse_pins({tensor: tier.value})[1]
    solution = solve(pinned(formulate(graph, COSTS), graph, COSTS, pins))
    assert solution is not None
    kinds = placement_of(graph, solution.values).stages[0].kinds
    for name, rows in kinds.items():
        stays = name == "embedding" and tensor != "optimizer"  # the table that the head reads too
        assert getattr(rows, tensor) == {Tier.GPU if stays else tier: rows.layers}


def test_counts_without_a_kind_speak_of_the_repeated_layers() -> None:
    graph = toy_graph(Strategy(dp=1, pp=2), blocks=8)
    pins = parse_pins({"parameters.host": 3, "recompute.full": 1, "optimizer.nvme": 0.5})[1]
    solution = solve(pinned(formulate(graph, COSTS), graph, COSTS, pins))
    assert solution is not None
    for stage in placement_of(graph, solution.values).stages:
        block = stage.kinds["block"]
        assert block.parameters[Tier.HOST] == 3
        assert sum(block.activations[Recompute.FULL].values()) == 1
        assert block.optimizer[Tier.NVME] == pytest.approx(2.0)


@settings(max_examples=examples(30))
@given(cases(stages=(1,)))
def test_pinning_a_placement_gives_that_placement(case: Case) -> None:
    settings = {}
    (stage,) = case.placement.stages
    for name, rows in stage.kinds.items():
        for tensor in ("parameters", "gradients"):
            for tier, count in getattr(rows, tensor).items():
                settings[f"{name}.{tensor}.{tier}"] = count
        for tier, share in rows.optimizer.items():
            settings[f"{name}.optimizer.{tier}"] = share / rows.layers
        settings[f"{name}.streamed"] = rows.streamed / rows.layers
        for recompute, tiers in rows.activations.items():
            settings[f"{name}.recompute.{recompute}"] = sum(tiers.values())
        for tier in Tier:
            kept = sum(tiers.get(tier, 0) for tiers in rows.activations.values())
            settings[f"{name}.activations.{tier}"] = kept
    pins = parse_pins(settings)[1]
    problem = formulate(case.graph, case.costs, Rings.of(case.placement))
    problem = pinned(problem, case.graph, case.costs, pins)
    values = decisions_of(case.graph, case.placement)
    assert all(abs(rule.expression.at(values)) < 1e-9 for rule in problem.rules if rule.equal)
    solution = solve(problem)
    assert solution is not None
    (found,) = placement_of(case.graph, solution.values).stages
    for name, rows in stage.kinds.items():
        for tier in Tier:
            for tensor in ("parameters", "gradients"):
                mine = getattr(found.kinds[name], tensor).get(tier, 0)
                assert mine == getattr(rows, tensor).get(tier, 0)
            share = found.kinds[name].optimizer.get(tier, 0.0)
            # Six digits are written; HiGHS keeps equalities to 1e-7 of their scale.
            assert share == pytest.approx(rows.optimizer.get(tier, 0.0), abs=1e-5)
        assert found.kinds[name].streamed == pytest.approx(rows.streamed, abs=1e-5)


def test_what_is_streamed_is_pinned_for_all_kinds() -> None:
    graph = toy_graph(tied=True)
    pins = parse_pins({"optimizer": "host", "streamed": 0.5})[1]
    solution = solve(pinned(formulate(graph, COSTS), graph, COSTS, pins))
    assert solution is not None
    for rows in placement_of(graph, solution.values).stages[0].kinds.values():
        assert rows.streamed == pytest.approx(rows.layers / 2)


def test_pins_that_contradict_each_other_fit_nothing() -> None:
    pins = parse_pins({"parameters": "host", "optimizer": "gpu"})[1]
    graph = toy_graph()
    assert solve(pinned(formulate(graph, COSTS), graph, COSTS, pins)) is None


def test_pins_keep_a_solution_that_obeys_them() -> None:
    graph = toy_graph(blocks=4)
    away = placed(graph, block=kind_placement(4, Tier.HOST, Tier.NVME, optimizer=Tier.HOST))
    pins = parse_pins({"block.parameters": "host", "block.gradients": "nvme"})[1]
    values = decisions_of(graph, away)
    assert all(
        rule.expression.at(values) <= 1e-9
        for rule in pinned(formulate(graph, COSTS), graph, COSTS, pins).rules
    )


@pytest.mark.parametrize("key", POSITIVE)
def test_none_of_what_must_be_there_is_refused(key: str) -> None:
    with pytest.raises(InputError, match=f"--set {key}=0: write a whole number of at least 1"):
        parse_pins({key: 0})
    parse_pins({key: 1})


@pytest.mark.parametrize("value", ["inf", "nan", "1e400", "2.5", "-1"])
def test_what_is_no_whole_number_is_refused(value: str) -> None:
    with pytest.raises(InputError, match=f"--set tp={value}: write a whole number"):
        parse_pins({"tp": value})


@pytest.mark.parametrize("key", SWITCHES)
def test_a_switch_is_on_or_off(key: str) -> None:
    with pytest.raises(InputError, match=f"--set {key}=2: write 0 or 1"):
        parse_pins({key: "2"})
    parse_pins({key: 0})
