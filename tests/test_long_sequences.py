"""Plans whose ranks split sequences, from descriptions to what runs and what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from bigplan.engines import make_plan as plan_by_engine
from bigplan.errors import InfeasibleError, InputError
from bigplan.plan import Plan, load_plan, save_plan
from bigplan.planner import Request, make_plan, programs_of, simulate_plan
from bigplan.recheck import recheck
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from bigplan.verify import verify
from tests.tiny import small_cluster

pytestmark = pytest.mark.usefixtures("first_plans")

LONG = 2**21  # tokens: 16 GiB of a hidden state of llama-3-8b
Settings = dict[str, str | int | float]


def _long_plan(settings: Settings) -> Plan:
    model = find_model("llama-3-8b").model_copy(update={"max_sequence_length": LONG})
    training = Training(sequence_length=LONG, global_batch=1)
    return make_plan(Request(model, training, find_cluster("dgx-h100"), settings, engine="native"))


@cache
def _tiny(settings: tuple[tuple[str, int], ...], devices: int = 2, batch: int = 4) -> Plan:
    training = Training(sequence_length=32, global_batch=batch, precision="fp32", steps=3)
    request = Request(
        find_model("tiny-llama-test"), training, small_cluster(devices), dict(settings)
    )
    return make_plan(request)


def test_a_sequence_that_fits_in_no_other_way_is_split() -> None:
    """Tensor parallelism of all eight GPUs is short of memory: it shares out no more."""
    with pytest.raises(InfeasibleError, match="does not fit"):
        _long_plan({"cp": 1})
    plan = _long_plan({})
    assert plan.strategy.cp > 1
    assert plan.strategy.zero > 0  # over ranks that all work on the only sequence
    assert plan.executable["native"] is True
    candidate, programs = programs_of(plan)
    verify(programs, candidate.graph, candidate.costs.capacity, candidate.costs.sharing)
    assert simulate_plan(plan).seconds == plan.predicted.step_seconds


def test_a_pinned_split_is_planned_whatever_the_length() -> None:
    plan = _tiny((("cp", 2),))
    assert (plan.strategy.cp, plan.strategy.dp, plan.strategy.shards) == (2, 1, 2)
    assert plan.predicted.parts.collectives > 0
    assert plan.executable["native"] is True


def test_one_sequence_may_employ_all_gpus() -> None:
    plan = _tiny((("cp", 2), ("tp", 1), ("pp", 1)), 4, batch=2)
    assert (plan.strategy.cp, plan.strategy.dp) == (2, 2)
    with pytest.raises(InputError, match="dp x cp x tp x pp must equal the GPUs"):
        _tiny((("cp", 4),), 2)
    with pytest.raises(InputError, match=r"cp 3 does not divide heads 4 .* use a cp that does"):
        _tiny((("cp", 3),), 4)


def test_such_a_plan_is_read_again(tmp_path: Path) -> None:
    plan, path = _tiny((("cp", 2),)), tmp_path / "plan.yaml"
    save_plan(plan, path)
    assert recheck(load_plan(path), path).note == ""
    edited = plan.model_copy(update={"strategy": plan.strategy.model_copy(update={"cp": 4})})
    with pytest.raises(InputError, match=r"strategy\.\w+: \d is no way to split .* cp 4"):
        recheck(edited, path)


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("deepspeed", "Ulysses .* cp 2 needs --engine native"),
        ("megatron", "cp 2 needs --engine native"),
        ("torchtitan", "cp 2 needs --engine native"),
    ],
)
def test_other_engines_refuse_it_by_name(engine: str, told: str) -> None:
    training = Training(sequence_length=512, global_batch=8)
    request = Request(
        find_model("llama-3-8b"), training, find_cluster("dgx-h100"), {"cp": 2}, engine=engine
    )
    with pytest.raises(InputError, match=told):
        plan_by_engine(request)
