"""A page of each kind, small, made once."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from bigplan.experiment.running import StudyOutcome, plan_all
from bigplan.launcher.record import Metric, Record, Summary
from bigplan.page.cluster_page import cluster_page
from bigplan.page.experiment_page import experiment_page
from bigplan.page.help import Help
from bigplan.page.html import page_html
from bigplan.page.parts import Page
from bigplan.page.plan_page import plan_page
from bigplan.page.run_page import run_page
from bigplan.placement import Tier
from bigplan.plan import Alternative, Plan, fullest
from bigplan.planner import simulate_plan
from bigplan.spec.catalog import find_cluster
from bigplan.timeline import Event, Timeline
from bigplan.whatif import Answer
from bigplan.whatif import Outcome as Changed
from tests.experiment.studies import study, unseen
from tests.report.test_operators import planned
from tests.tiny import tiny_plan

KINDS = ("plan", "run", "cluster", "experiment")


@cache
def page(kind: str) -> Page:
    match kind:
        case "plan":
            return plan_page(rivalled(planned("offloaded")), some_help(planned("offloaded")))
        case "run":
            return run_page(record(tiny_plan()))
        case "cluster":
            return cluster_page(find_cluster("dgx-h100"))
        case _:
            return experiment_page(outcome())


@cache
def html(kind: str) -> str:
    return page_html(page(kind))


def rivalled(plan: Plan) -> Plan:
    """The plan with a runner-up: a quarter slower, with a tenth less GPU memory."""
    memory = fullest(plan.predicted.memory)
    other = Alternative(
        strategy=plan.strategy.model_copy(update={"micro_batch": 1}),
        step_seconds=1.25 * plan.predicted.step_seconds,
        parts=plan.predicted.parts,
        memory=memory | {Tier.GPU: int(0.9 * memory[Tier.GPU])},
    )
    return plan.model_copy(update={"alternatives": (other,)})


def some_help(plan: Plan) -> Help:
    seconds = plan.predicted.step_seconds
    faster = Changed("twice the PCIe bandwidth", seconds, seconds / 2, "cpu")
    nothing = Changed("64 GiB more host memory per node", seconds, seconds, "cpu")
    return Help(seconds, Answer((faster, nothing), ("one more node (2 GPUs)",)))


def record(plan: Plan) -> Record:
    """Of three steps, each half as long again as predicted."""
    predicted = simulate_plan(plan)
    slower = [e._replace(start=1.5 * e.start, end=1.5 * e.end) for e in predicted.events]
    waited = Event(0, "gpu compute", "free", 0, 0, 0.0, predicted.seconds)
    measured = Timeline((*slower, waited), 1.5 * predicted.seconds)
    metrics = [
        Metric(step=n, loss=5.0 - n, seconds=measured.seconds, tokens_per_second=1e3)
        for n in (1, 2, 3)
    ]
    summary = Summary(
        status="finished",
        steps=3,
        ranks=2,
        seconds=3 * measured.seconds,
        predicted_step_seconds=predicted.seconds,
        measured_step_seconds=measured.seconds,
        memory=(),
        versions={"bigplan": "0"},
        notes=("a <b>note</b> & more",),
        digest="",
    )
    return Record(Path("runs/tiny-1"), plan, tuple(metrics), predicted, measured, summary)


@cache
def outcome() -> StudyOutcome:
    """What is read of it later is in memory: its folder goes at once."""
    with TemporaryDirectory() as folder:
        return plan_all(study(Path(folder)), Path(folder) / "out", 1, unseen)
