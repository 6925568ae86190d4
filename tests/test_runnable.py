"""What can be run today where the best plan cannot, and why where nothing can."""

from dataclasses import replace

import pytest

from bigplan import runnable
from bigplan.errors import InfeasibleError
from bigplan.plan import Plan
from bigplan.planner import Request, make_plan
from bigplan.report.today import today_json, today_text
from bigplan.runnable import Runnable, best_runnable
from bigplan.solve.search import Watch, unwatched
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.training import Training
from tests.tiny import tiny_plan
from tests.wording import tells

TRAINING = Training(sequence_length=255, global_batch=32)
REQUEST = Request(find_model("tiny-llama-demo"), TRAINING, find_cluster("dgx-h100"), {})
SPLIT = {"tp": 4, "micro_batch": 1}
REFUSAL = (
    "the native runtime shares out the tokens of a micro-batch to tensor-parallel ranks, and 255 "
    "do not divide by tp 4"
)


def test_a_plan_that_runs_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runnable, "make_plan", None)
    plan = tiny_plan()
    found = best_runnable(REQUEST, plan)
    assert found == Runnable(plan)
    assert today_text(plan, found) == "Runs today: yes, with `bigplan launch`."
    assert today_json(plan, found)["best"] is True
    assert today_json(plan, found)["slower_by"] == 0


def test_what_this_machine_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigplan.installed.find_spec", lambda _: None)
    plan = tiny_plan()
    text = today_text(plan, Runnable(plan))
    assert tells(text, "Runs today: yes", "bigplan launch", "not from here", "torch")


def test_beside_a_plan_that_does_not_run_stands_the_best_that_does() -> None:
    split = make_plan(replace(REQUEST, settings=SPLIT))
    found = best_runnable(REQUEST, split)
    assert found.plan is not None
    assert found.plan.strategy == make_plan(replace(REQUEST, engine="native")).strategy
    assert found.plan.executable["native"] is True
    slower = found.plan.predicted.step_seconds / split.predicted.step_seconds - 1
    text = today_text(split, found)
    best = f"data parallel {found.plan.strategy.dp}"
    assert tells(text, "Runs today: no", REFUSAL, best, f"{slower:+.0%}", "--engine native")
    told = today_json(split, found)
    assert told["best"] is False
    assert told["strategy"] == found.plan.strategy.model_dump(mode="json")
    assert told["slower_by"] == pytest.approx(slower)


def test_decisions_that_rule_it_out_are_named() -> None:
    training = TRAINING.model_copy(update={"global_batch": 1})
    request = replace(REQUEST, training=training, settings={"tp": 4, "pp": 2})
    plan = make_plan(request)
    found = best_runnable(request, plan)
    assert found.plan is None
    assert tells(found.because, "global batch of 1", "8 GPUs", "tp=4, pp=2")
    assert found.because.rstrip(".") in today_text(plan, found)


def test_what_no_split_makes_run_is_said_once() -> None:
    training = TRAINING.model_copy(update={"dropout": 0.1})
    request = replace(REQUEST, training=training)
    plan = make_plan(request)
    found = best_runnable(request, plan)
    text = today_text(plan, found)
    assert tells(text, "Runs today: no", "dropout 0.1", "use dropout 0.0")
    assert text.count("0.1") == 1


def test_nothing_that_runs_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_fits(request: Request, watch: Watch) -> Plan:
        assert request.engine == "native"
        raise InfeasibleError("gpu memory is 3 GiB short.")

    plan = make_plan(replace(REQUEST, settings=SPLIT))
    monkeypatch.setattr(runnable, "make_plan", none_fits)
    text = today_text(plan, best_runnable(REQUEST, plan, unwatched))
    assert text.endswith("gpu memory is 3 GiB short.")
