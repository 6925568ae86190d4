"""A plan from Python: the same as the command's, and what its methods give."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import bigplan
from bigplan.errors import InfeasibleError, InputError, RefusedError
from bigplan.plan import plan_text
from bigplan.spec.catalog import find_cluster, find_model
from bigplan.spec.experiment import Experiment
from bigplan.spec.training import TrainingRequest
from tests.tiny import small_cluster, tiny_plan, write_cluster
from tests.wording import tells

TRAINING = {"sequence_length": 32, "global_batch": 4, "precision": "fp32", "steps": 3}
FILE = """\
model: tiny-llama-test
cluster: small.yaml
training: {sequence_length: 32, global_batch: 8, precision: fp32, steps: 3}
engine: native
set: {dp: 2}
"""


@pytest.fixture
def plan() -> bigplan.Plan:
    return bigplan.Plan.of(tiny_plan())


def test_the_plan_of_the_planner(tmp_path: Path) -> None:
    """Names, paths and descriptions say the same."""
    found = bigplan.plan(
        model="tiny-llama-test",
        cluster=write_cluster(tmp_path),
        training=TRAINING,
        set={"dp": 2},
        engine="native",
    )
    assert plan_text(found) == plan_text(tiny_plan())
    again = bigplan.plan(
        model=find_model("tiny-llama-test"),
        cluster=small_cluster(),
        training=TrainingRequest.model_validate(TRAINING),
        set={"dp": 2},
        engine="native",
    )
    assert again == found
    assert found.strategy.dp == 2
    assert found.predicted.step_seconds == tiny_plan().predicted.step_seconds


def test_keys_win_over_a_file_key_by_key(tmp_path: Path) -> None:
    write_cluster(tmp_path)
    path = tmp_path / "one.yaml"
    path.write_text(FILE)
    found = bigplan.plan(path, training={"global_batch": 4})
    assert plan_text(found) == plan_text(tiny_plan())
    described = Experiment(
        model="tiny-llama-test", cluster=small_cluster(), training=TRAINING, engine="native"
    )
    assert bigplan.plan(described, set={"dp": 2}) == found


def test_caps_are_text_or_bytes() -> None:
    cluster, training = small_cluster(1), {**TRAINING, "sequence_length": 64}
    for cap in ("24 MiB", 24 << 20):
        found = bigplan.plan(
            model="tiny-llama-demo",
            cluster=cluster,
            training=training,
            caps={"gpu": cap},
            engine="native",
        )
        assert found.cluster.group.gpu.memory == 24 << 20


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(InputError, match=r"unknown key 'trainig'; did you mean 'training'\?"):
        bigplan.plan(model="llama-3-8b", cluster="dgx-h100", trainig={})  # type: ignore[call-arg]
    with pytest.raises(InputError, match="did you mean 'dgx-h100'"):
        bigplan.plan(model="llama-3-8b", cluster="dgx-h10")
    with pytest.raises(InputError, match="cluster"):
        bigplan.plan(model="llama-3-8b")
    with pytest.raises(InfeasibleError):
        bigplan.plan(model="tiny-llama-demo", cluster=small_cluster(1), caps={"gpu": "2 MiB"})
    assert issubclass(InfeasibleError, bigplan.BigplanError)


def test_a_time_limit_ends_the_search() -> None:
    found = bigplan.plan(model="llama-3-70b", cluster="dgx-h100", nodes=4, time_limit=0.0)
    assert found.search.stopped
    assert found.cluster == find_cluster("dgx-h100").with_nodes(4)


@pytest.mark.parametrize("limit", [-1, float("nan"), "x"])
def test_a_time_limit_is_a_number_of_seconds(limit: Any) -> None:
    with pytest.raises(InputError, match=r"time_limit is .* must be seconds, 0 or more"):
        bigplan.plan(model="gpt2-xl", cluster="h200-1x", time_limit=limit)


def test_the_cheapest_number_of_nodes() -> None:
    training = {"sequence_length": 256, "global_batch": 16, "tokens": "1 M"}
    found = bigplan.plan(
        model="tiny-llama-demo",
        cluster="dgx-h100",
        nodes=2,
        training=training,
        engine="native",
        prefer="cheapest",
    )
    assert found.cluster.nodes == 1


def test_saved_and_read_again(plan: bigplan.Plan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan.yaml")
    assert bigplan.Plan.load(str(path)) == plan
    text = path.read_text().replace("mfu: ", "mfu: 9")
    path.write_text(text)
    assert bigplan.Plan.load(path) == plan  # promises are worked out again


def test_no_file_of_another_kind_is_replaced(plan: bigplan.Plan, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("mine")
    writes = (
        (plan.save, "no plan"),
        (plan.simulate().save, "no trace"),
        (lambda path: plan.report(html=path), "no page"),
        (lambda path: plan.report(svg=path), "no picture"),
    )
    for write, kind in writes:
        with pytest.raises(InputError, match=f"{notes} exists and is {kind} that could be repl"):
            write(notes)
    assert notes.read_text() == "mine"
    kept = plan.save(tmp_path / "plan.yaml")
    assert plan.save(kept) == kept


def test_a_plan_in_a_notebook(plan: bigplan.Plan) -> None:
    shown = plan._repr_html_()
    assert plan.decision in shown
    for part in ("step time", "Where tensors live", "Memory of one GPU", "Time by resource"):
        assert part in shown


def test_explained(plan: bigplan.Plan, tmp_path: Path) -> None:
    found = plan.explain()
    assert sum(row.seconds for row in found.rows) > 0
    assert found.to_json()["headline"] == plan.decision
    assert "Operators of a step" in found._repr_html_()
    assert len(repr(found)) < 1000  # what a terminal shows: no operators
    assert json.dumps(found.to_json())
    assert asdict(found)["step_seconds"] == plan.predicted.step_seconds


def test_simulated(plan: bigplan.Plan, tmp_path: Path) -> None:
    step = plan.simulate()
    assert step.seconds == pytest.approx(plan.predicted.step_seconds)
    events = json.loads(step.save(tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(step.events)
    assert "Time by resource" in step._repr_html_()
    assert tells(repr(step), f"in {len(step.events)} events", "bound by")
    assert len(repr(step)) < 200


def test_a_report_without_a_file_is_told(plan: bigplan.Plan) -> None:
    with pytest.raises(InputError, match="none is named; add html, svg or png"):
        plan.report()


def test_what_would_help(plan: bigplan.Plan) -> None:
    found = plan.what_would_help(set={"dp": 2})
    assert found.before_seconds == plan.predicted.step_seconds
    solved = [outcome.change for outcome in found.answer.outcomes]
    assert solved
    assert all(change in found._repr_html_() for change in solved)


def test_a_page_and_pictures(plan: bigplan.Plan, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    plan.report(html=tmp_path / "a.html", svg=tmp_path / "a.svg", png=str(tmp_path / "a.png"))
    assert plan.decision in (tmp_path / "a.html").read_text()
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_pages_need_the_library(plan: bigplan.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigplan.page.html.find_spec", lambda name: None)
    with pytest.raises(RefusedError, match=r"pip install 'bigplan\[report\]'"):
        plan.report(html="never.html")
    assert not Path("never.html").exists()
