"""Plans that were edited by hand: refused by the field's name or promised anew, never believed."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigplan.errors import BigplanError, InputError
from bigplan.plan import Plan, load_plan, plan_text
from bigplan.planner import Request, make_plan
from bigplan.recheck import Rechecked, recheck
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.files.document import dump_document
from bigplan.spec.optimizer import Optimizer
from bigplan.spec.training import Training
from bigplan.units import format_seconds
from tests.examples import examples
from tests.tiny import capped_plan, tiny_plan

Key = tuple[str | int, ...]
NAMES = ("data parallel", "offloaded", "on a drive", "zero 3", "pipeline", "interleaved")


@cache
def made(name: str) -> Plan:
    """A plan as `bigplan plan` makes it."""
    if name == "data parallel":
        return tiny_plan(2)
    if name == "offloaded":
        return capped_plan()
    if name == "on a drive":
        return capped_plan(host=70)
    model, training = find_model("tiny-llama-demo"), Training(sequence_length=256, global_batch=16)
    if name == "muon":  # whose directions take another time by every stage of ZeRO that is tried
        training = training.model_copy(update={"optimizer": Optimizer(name="muon")})
    pins: dict[str, int] = {
        "muon": {},
        "zero 3": {"zero": 3, "tp": 2},
        "pipeline": {"pp": 4, "tp": 1, "zero": 0},
        "interleaved": {"pp": 2, "vpp": 2, "tp": 2, "zero": 1},
    }[name]
    return make_plan(Request(model, training, find_cluster("dgx-h100"), pins))


def data_of(plan: Plan) -> dict[str, Any]:
    """What its file holds, to be changed."""
    return deepcopy(plan.model_dump(mode="json"))


def reread(data: dict[str, Any], folder: Path) -> Rechecked:
    """The data through a file, as every command reads it."""
    path = folder / "plan.yaml"
    path.write_text(dump_document(data))
    return recheck(load_plan(path), path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.mark.parametrize("name", [*NAMES, "muon"])
def test_an_unedited_plan_stays_as_it_is(name: str, folder: Path) -> None:
    found = reread(data_of(made(name)), folder)
    assert found.note == ""
    assert plan_text(found.plan) == plan_text(made(name))


def _keys(data: object, key: Key = ()) -> Iterator[Key]:
    """Every value's place, inner ones too."""
    if key:
        yield key
    if isinstance(data, dict | list):
        for name, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _keys(value, (*key, name))


def _set(data: Any, key: Key, value: object) -> None:
    for name in key[:-1]:
        data = data[name]
    data[key[-1]] = value


def _at(data: Any, key: Key) -> Any:
    for name in key:
        data = data[name]
    return data


WRONG: tuple[object, ...] = (
    -1,
    0,
    1,
    2,
    3,
    5,
    10**12,
    2**70,
    0.5,
    -2.5,
    1e300,
    "x",
    "",
    None,
    True,
    [],
    {},
    [1],
)


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, Key, object]:
    """A plan, a place in it, and what to write there: any value, or layers moved between tiers."""
    name = draw(st.sampled_from(NAMES))
    data = data_of(made(name))
    part = draw(st.sampled_from(("moved", "placement", "strategy", "predicted", "executable")))
    if part == "moved":
        places = ("parameters", "gradients", "optimizer", "none")
        moved = [key for key in _keys(data["placement"], ("placement",)) if key[-1] in places]
        key = draw(st.sampled_from(moved))
        tiers = dict(_at(data, key))
        source = draw(st.sampled_from(sorted(tiers)))
        target = draw(st.sampled_from(("gpu", "host", "nvme")))
        layers = draw(st.integers(1, 8))
        tiers[source] -= layers
        tiers[target] = tiers.get(target, 0) + layers
        return name, key, tiers
    key = draw(st.sampled_from(list(_keys(data[part], (part,)))))
    old = _at(data, key)
    numbers = (2 * old, old + 1, -old) if isinstance(old, int | float) else ()
    return name, key, draw(st.sampled_from((*WRONG, *numbers)))


@settings(max_examples=examples(120), deadline=None)
@given(edit=edits())
def test_every_edit_is_refused_by_name_or_its_promises_are_made_again(
    edit: tuple[str, Key, object], folder: Path
) -> None:
    name, key, value = edit
    data = data_of(made(name))
    _set(data, key, value)
    try:
        found = reread(data, folder)
    except BigplanError as error:
        refusal = error
    else:
        _assert_kept(data, found.plan)
        return
    assert refusal.exit_code in (2, 3)
    places = [str(part) for part in key if isinstance(part, str)]
    assert any(part in str(refusal) for part in (*(places[1:] or places), "memory per"))


def _assert_kept(data: dict[str, Any], plan: Plan) -> None:
    """What it promises holds, and its decisions are those that were written."""
    assert all(use.used_bytes <= use.capacity_bytes for use in plan.predicted.memory)
    assert recheck(plan, Path("plan.yaml")).note == ""
    assert plan.strategy.model_dump(mode="json") == data["strategy"]
    for stage, kept in zip(data["placement"]["stages"], plan.placement.stages, strict=True):
        for kind, written in stage["kinds"].items():
            assert kept.kinds[kind].model_dump(mode="json")["parameters"] == written["parameters"]


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (("strategy", "dp"), 4, "strategy.dp: 4 is no way to split"),
        (("strategy", "micro_batch"), 3, "strategy.micro_batch: 3 is no way to split"),
        (("strategy", "accumulation_group"), 3, "strategy.accumulation_group: 3 is no way"),
        (("placement", "stages"), [], "placement.stages: 0 stages, but strategy.pp is 1"),
        (("placement", "loss_chunk"), 10**9, "placement.loss_chunk: 1000000000 tokens"),
        (("placement", "chunk"), 1, "placement.chunk: 1; every plan has 268435456"),
        (("placement", "slots"), 0, "placement.slots"),
    ],
)
def test_decisions_that_no_search_makes(key: Key, value: object, told: str, folder: Path) -> None:
    data = data_of(tiny_plan(2))
    _set(data, key, value)
    with pytest.raises(InputError) as error:
        reread(data, folder)
    assert told in str(error.value)


def block(stage: int, *key: str) -> Key:
    """The place of a count of a stage's blocks."""
    return ("placement", "stages", stage, "kinds", "block", *key)


@pytest.mark.parametrize(
    ("name", "key", "value", "told"),
    [
        ("offloaded", block(0, "parameters"), {"gpu": 8, "host": -2}, "parameters.host"),
        ("offloaded", block(0, "activations", "none"), {"gpu": 7, "nvme": -1}, "none.nvme"),
        ("offloaded", block(0, "layers"), 5, "places 6 of 5 layers"),
        ("interleaved", block(1, "gradients"), {"gpu": 2, "host": 1}, "optimizer.gpu is 3"),
        (
            "interleaved",
            block(1, "activations"),
            {"full": {"host": 3}},
            "stages.1.kinds.block.activations.full.host: 3 layers; with zero 1 and vpp 2 it is 0",
        ),
        ("pipeline", ("strategy", "vpp"), 10**12, "strategy.vpp: 1000000000000 is no way to split"),
        ("pipeline", block(2, "activations"), {"full": {"gpu": 2}}, "alike are placed alike"),
        ("pipeline", ("strategy", "first_blocks"), 2, "placement.stages.0.kinds.block.layers: 1"),
    ],
)
def test_placements_that_no_search_makes(
    name: str, key: Key, value: object, told: str, folder: Path
) -> None:
    data = data_of(made(name))
    _set(data, key, value)
    with pytest.raises(InputError) as error:
        reread(data, folder)
    assert told in str(error.value)


def test_layers_that_are_trained_have_gradients_and_state_somewhere(folder: Path) -> None:
    data = data_of(made("offloaded"))
    for key, value in (("gradients", {}), ("optimizer", {}), ("streamed", 0.0)):
        _set(data, block(0, key), value)
    with pytest.raises(InputError, match=r"block\.gradients: nowhere"):
        reread(data, folder)


@pytest.mark.parametrize(
    ("name", "tensors", "told"),
    [
        ("offloaded", {"parameters": {"gpu": 6}}, r"gpu memory per GPU, .* MiB more than the 23\."),
        ("on a drive", {"gradients": {"host": 6}}, "host memory per node, .* more than the 70 MiB"),
    ],
)
def test_memory_is_counted_again(
    name: str, tensors: dict[str, object], told: str, folder: Path
) -> None:
    data = data_of(made(name))
    for tensor, tiers in tensors.items():
        _set(data, block(0, tensor), tiers)
    with pytest.raises(InputError, match=told):
        reread(data, folder)


def test_what_a_plan_says_of_itself_is_not_believed(folder: Path) -> None:
    plan = made("offloaded")
    data = data_of(plan)
    _set(data, ("predicted", "memory", 0, "used_bytes"), 1)
    _set(data, ("predicted", "step_seconds"), 1e-6)
    _set(data, ("executable", "deepspeed"), True)
    found = reread(data, folder)
    assert found.plan == plan
    told = "the predicted.step_seconds, predicted.memory.0.used_bytes, executable.deepspeed that"
    assert told in found.note
    assert "1 us was written" in found.note
    step = plan.predicted.step_seconds
    _set(data, ("predicted", "step_seconds"), step * (1 + 1e-7))
    note = reread(data, folder).note
    assert note.endswith(f"a step of {format_seconds(step)}, as was written, to these digits")


def test_moved_layers_get_their_own_promises(folder: Path) -> None:
    """Activations that are recomputed, not moved: less in host memory, another step."""
    plan = made("offloaded")
    data = data_of(plan)
    _set(data, block(0, "activations"), {"full": {"host": 6}})
    found = reread(data, folder)
    before, after = plan.predicted, found.plan.predicted
    assert "so its predictions are recomputed" in found.note
    assert after.memory[1].used_bytes < before.memory[1].used_bytes
    assert after.parts.recompute > 0 == before.parts.recompute
    assert after.lower_bound_seconds <= after.step_seconds
