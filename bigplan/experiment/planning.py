"""One experiment planned, in any process: its plan and its row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bigplan.cheapest import cheapest
from bigplan.engines import make_plan
from bigplan.errors import InfeasibleError, InputError
from bigplan.experiment.row import StudyRow
from bigplan.largest import largest_value
from bigplan.plan import Plan, plan_text
from bigplan.planner import Request
from bigplan.spec.experiment import Experiment, set_key
from bigplan.spec.files.document import validate
from bigplan.spec.sweep import Find, written_out


@dataclass(frozen=True, slots=True)
class Task:
    """An experiment to plan; `key` names it among all that were ever planned."""

    key: str
    experiment: Experiment
    find: Find | None = None


@dataclass(frozen=True, slots=True)
class PlannedPoint:
    """A point's row, and its plan as text; empty where there is none."""

    task: Task
    row: StudyRow
    plan: str = ""


@dataclass(frozen=True, slots=True)
class _Made:
    plan: Plan


def plan_task(task: Task) -> PlannedPoint:
    """Plan the task; where planning fails, the row gives the reason."""
    experiment, found = task.experiment, None
    try:
        if task.find is None:
            plan = best_plan(experiment)
        else:
            found, plan = largest(experiment, task.find)
    except (InfeasibleError, InputError) as error:
        return PlannedPoint(task, StudyRow.failed(str(error)))
    return PlannedPoint(task, StudyRow.of(plan, experiment.within, found), plan_text(plan))


def best_plan(experiment: Experiment) -> Plan:
    """The fastest plan, or the cheapest over numbers of nodes. Raises as make_plan."""
    request = Request.of(experiment)
    if experiment.prefer == "fastest":
        return make_plan(request)
    return cheapest(request, experiment.within, lambda one: _Made(make_plan(one))).best.plan


def largest(experiment: Experiment, find: Find) -> tuple[int, Plan]:
    """The largest value with which a plan fits, and that plan.

    Values are tried as in `largest_value`. Raises the error of the least value.
    """
    step = find.multiple_of
    low, high = -(-find.least // step), find.most // step

    def planned(number: int) -> Plan:
        return best_plan(with_value(experiment, find.largest, number * step))

    def fits(number: int) -> Plan | None:
        try:
            return planned(number)
        except (InfeasibleError, InputError):
            return None

    least = planned(low)
    found, _, plan = largest_value(low, high, fits)
    return found * step, plan or least


def with_value(experiment: Experiment, key: str, value: int) -> Experiment:
    """The experiment with one key changed. Raises InputError."""
    data = experiment.model_dump(mode="json", exclude_unset=True)
    if key.startswith("model.") and isinstance(data["model"], str):
        data["model"] = written_out(data["model"], Path())
    return validate(set_key(data, key, value), Experiment, key)
