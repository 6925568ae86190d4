"""Engines behind their interface, and which of them a request is planned for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bigplan.engines import ENGINES, chosen, engine_of, make_plan
from bigplan.engines.auto import choose
from bigplan.errors import InfeasibleError, InputError, RefusedError
from bigplan.graph.strategy import Strategy
from bigplan.importing import named
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.recheck import Rechecked
from bigplan.report.today import engines_text, today_json
from bigplan.runnable import Runnable
from bigplan.solve.search import Watch, unwatched
from bigplan.spec.catalog import find_model
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.timeline import Timeline
from tests.tiny import small_cluster
from tests.wording import tells

TRAINING = Training(sequence_length=32, global_batch=4, precision="fp32")
REQUEST = Request(find_model("tiny-llama-test"), TRAINING, small_cluster(2), engine="auto")


@dataclass(frozen=True)
class Fake:
    """An engine whose plan takes `seconds`, where it can make one."""

    name: str
    seconds: float = 1.0
    lacks: str | None = None
    trouble: Exception | None = None
    worker: str = "nowhere:Worker"

    def refusal(self, model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
        return None

    def missing(self) -> str | None:
        return self.lacks

    def prepare(self, plan: Plan, waiting: Callable[[str], None]) -> None:
        raise NotImplementedError

    def make_plan(self, request: Request, watch: Watch) -> Plan:
        assert request.engine == self.name
        if self.trouble:
            raise self.trouble
        return plan_of(self.name, self.seconds)

    def recheck(self, plan: Plan, path: Path) -> Rechecked:
        raise NotImplementedError

    def timeline(self, plan: Plan) -> Timeline:
        raise NotImplementedError


def plan_of(engine: str, seconds: float, refused: str = "") -> Plan:
    plan = make_plan(replace(REQUEST, engine="native"))
    predicted = plan.predicted.model_copy(update={"step_seconds": seconds})
    runs = {engine: refused or True}
    changes = {"engine": engine, "predicted": predicted, "executable": runs}
    return plan.model_copy(update=changes)


def test_the_fastest_that_is_installed_is_taken() -> None:
    engines = (Fake("slow", 3.0), Fake("fast", 2.0), Fake("absent", 1.0, lacks="not installed"))
    found = choose(REQUEST, engines, plan_of("slow", 3.0), unwatched)
    assert found.plan.engine == "fast"
    assert list(found.by_engine) == ["slow", "fast"]
    text = engines_text(found.plan, Runnable(found.plan, chosen=found))
    assert tells(text, "slow 3 s", "+50%", "fast 2 s", "taken")
    assert "absent" not in text


def test_an_engine_without_a_plan_says_why_and_the_planners_best_is_told() -> None:
    trouble = InfeasibleError("gpu memory is short. Add some")
    best = plan_of("wide", 1.0, refused="tensor parallelism of another kind")
    found = choose(REQUEST, (Fake("one", 2.0), Fake("two", trouble=trouble)), best, unwatched)
    assert found.plan.engine == "one"
    runnable = Runnable(found.plan, chosen=found)
    text = engines_text(found.plan, runnable)
    assert tells(text, "one 2 s", "taken", "two", "gpu memory is short")
    assert tells(text, "-50%", "tensor parallelism of another kind")
    told = today_json(found.plan, runnable)["engines"]
    assert told == {
        "one": {"step_seconds": 2.0, "because": None},
        "two": {"step_seconds": None, "because": "gpu memory is short. Add some"},
    }


def test_where_nothing_is_installed_the_planners_best_is_the_plan() -> None:
    best = plan_of("one", 1.0)
    found = choose(REQUEST, (Fake("one", lacks="no torch"),), best, unwatched)
    assert found.plan == best
    assert not found.by_engine
    assert engines_text(best, Runnable(best, chosen=found)) == ""


def test_real_engines_are_asked_and_the_best_is_the_fastest_of_them() -> None:
    found = chosen(REQUEST)
    for name, plan in found.by_engine.items():
        assert isinstance(plan, Plan)
        assert plan.engine == name
        assert plan.executable[name] is True
        assert found.plan.predicted.step_seconds <= plan.predicted.step_seconds
    assert make_plan(REQUEST) == found.plan


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_has_a_worker_and_a_timeline_of_its_promise(name: str) -> None:
    engine = ENGINES[name]
    plan = make_plan(replace(REQUEST, engine=name))
    assert engine_of(plan) is engine
    assert {"preflight", "start", "step", "save", "finish", "close"} <= set(
        dir(named(engine.worker))
    )
    assert engine.timeline(plan).seconds == pytest.approx(plan.predicted.step_seconds)
    assert engine.recheck(plan, Path("plan.yaml")).plan == plan


def test_a_plan_for_an_engine_that_is_not_there_is_refused() -> None:
    plan = make_plan(replace(REQUEST, engine="native")).model_copy(update={"engine": "warp"})
    with pytest.raises(InputError, match="for the engine warp; this version of bigplan has native"):
        engine_of(plan)


def test_exact_search_is_the_native_engines() -> None:
    with pytest.raises(RefusedError, match="every way is tried anyway"):
        make_plan(replace(REQUEST, engine="deepspeed", exact=True))


def test_an_edited_configuration_is_recomputed(tmp_path: Path) -> None:
    plan = make_plan(replace(REQUEST, engine="deepspeed"))
    config = {**plan.config, "json": {**plan.config["json"], "gradient_clipping": 7.0}}
    edited = plan.model_copy(update={"config": config})
    found = engine_of(edited).recheck(edited, tmp_path / "plan.yaml")
    assert found.plan == plan
    assert "computed again" in found.note
