"""`bigplan.plan`, and the plan that it returns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Unpack

from bigplan.api.keys import ExperimentKeys, merged, plain
from bigplan.api.shown import Explanation, Simulation, WhatWouldHelp
from bigplan.bill import Bill, bill_of
from bigplan.cheapest import cheapest, require_in_time
from bigplan.engines import engine_of, make_plan
from bigplan.errors import InputError, quoted
from bigplan.page.files import require_file, write_page
from bigplan.page.help import Help
from bigplan.page.html import grids_html
from bigplan.page.parts import grid
from bigplan.page.plan_page import plan_page
from bigplan.plan import Plan as Decided
from bigplan.plan import load_plan, save_plan
from bigplan.planner import Request
from bigplan.report.decision import decision
from bigplan.report.explain import explain
from bigplan.report.plan_report import promise_table
from bigplan.report.stages import stages_of
from bigplan.report.tables import busy_table, homes_table, memory_table
from bigplan.spec.experiment import Experiment, load_experiment
from bigplan.spec.files.document import validate
from bigplan.targets import PLAN, require_target
from bigplan.whatif import what_would_help


class Plan(Decided):
    """Every decision, and what it promises; fields have the names of the plan's YAML.

    `plan.predicted.step_seconds`, `plan.strategy.tp`, `plan.placement.stages`: all are frozen.
    In a notebook a plan shows itself as tables.
    """

    @classmethod
    def of(cls, decided: Decided) -> Plan:
        """The planner's plan with these methods."""
        return cls.model_construct(**dict(decided))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; its promises are worked out again. Raises InputError."""
        where = Path(path).expanduser()
        read = load_plan(where)
        return cls.of(engine_of(read).recheck(read, where).plan)

    def save(self, path: str | Path) -> Path:
        """Write the plan as YAML, for `bigplan launch` and Plan.load; only a plan is replaced.

        Raises InputError.
        """
        where = Path(path).expanduser()
        require_target("path", where, PLAN)
        save_plan(self, where)
        return where

    @property
    def decision(self) -> str:
        """The plan in one sentence."""
        return decision(self, stages_of(self))

    @property
    def bill(self) -> Bill:
        """Days, dollars and kWh, as far as cluster and training state them."""
        return bill_of(self)

    def explain(self) -> Explanation:
        """Every operator and move, efficiency and advice.

        Raises RefusedError for plans of other engines, which run no program of actions.
        """
        return Explanation.of(explain(self))

    def simulate(self) -> Simulation:
        """The steady step played again, action by action."""
        played = engine_of(self).timeline(self)
        return Simulation(played.events, played.seconds, self.predicted)

    def what_would_help(
        self,
        set: Mapping[str, str | int | float] | None = None,  # noqa: A002 -- the YAML's name
        time_limit: float | None = None,
    ) -> WhatWouldHelp:
        """Solve again with another drive, more memory, another node, for `time_limit` seconds.

        `set`: the decisions that this plan was pinned to, because a plan does not keep them.
        """
        pinned = dict(set or {})
        request = Request(self.model, self.training, self.cluster, pinned, self.engine)
        time_left = _TimeLeft(time_limit)
        before = make_plan(request, time_left.watch)
        answer = what_would_help(request, before, time_left, time_left.watch)
        return WhatWouldHelp(before.predicted.step_seconds, answer)

    def report(
        self,
        html: str | Path | None = None,
        svg: str | Path | None = None,
        png: str | Path | None = None,
        help: Help | None = None,  # noqa: A002
    ) -> None:
        """Write the plan's page, or its picture; `help` is what `what_would_help` gave.

        Raises RefusedError without bigplan[report], InputError where a file cannot be written.
        """
        require_file(html, svg, png)
        write_page(plan_page(self, help), html, svg, png)

    def __repr__(self) -> str:
        return f"<Plan: {self.decision}>"

    __str__ = __repr__

    def _repr_html_(self) -> str:
        predicted = self.predicted
        busy = busy_table(predicted.busy_seconds, predicted.critical_path, predicted.step_seconds)
        return grids_html(
            self.decision,
            grid(promise_table(self)),
            grid(memory_table(predicted.memory), without=("",)),
            grid(homes_table(stages_of(self))),
            grid(busy),
        )


def plan(
    experiment: str | Path | Experiment | None = None,
    *,
    exact: bool = False,
    time_limit: float | None = None,
    **keys: Unpack[ExperimentKeys],
) -> Plan:
    """Find the fastest way to train a model on a cluster. Needs no GPU.

        bigplan.plan(model="llama-3-70b", cluster="dgx-h100", nodes=4)
        bigplan.plan("experiment.yaml", training={"global_batch": 64})

    `experiment` is a file, or a description; `keys` win over it, key by key. `exact` tries every
    placement: small problems only. `time_limit`: seconds after which the best plan so far is taken.
    Raises InputError, InfeasibleError and RefusedError, all of them BigplanErrors.
    """
    wanted = experiment_of(experiment, keys)
    request, time_left = Request.of(wanted, exact=exact), _TimeLeft(time_limit)
    if wanted.prefer == "fastest":
        fastest = make_plan(request, time_left.watch)
        require_in_time(fastest, wanted.within)
        return Plan.of(fastest)
    found = cheapest(
        request,
        wanted.within,
        lambda request: _WithPlan(make_plan(request, time_left.watch)),
        time_left,
    )
    return Plan.of(found.best.plan)


@dataclass(frozen=True, slots=True)
class _WithPlan:
    plan: Decided


def experiment_of(named: str | Path | Experiment | None, keys: ExperimentKeys) -> Experiment:
    """The experiment with its keys replaced by those given. Raises InputError."""
    given = plain(keys)
    if named is None:
        return validate(given, Experiment, "bigplan.plan")
    read = named if isinstance(named, Experiment) else load_experiment(Path(named).expanduser())
    return validate(merged(plain(read), given), Experiment, "bigplan.plan")


class _TimeLeft:
    """Whether any of `seconds` is left; None: no limit. Raises InputError for other values."""

    def __init__(self, seconds: float | None) -> None:
        limit: object = inf if seconds is None else seconds  # a script may give anything
        if not (isinstance(limit, int | float) and limit >= 0):
            raise InputError(
                f"time_limit is {quoted(seconds)}, which must be seconds, 0 or more; leave it out "
                "for a whole search"
            )
        self._end = time.monotonic() + limit

    def __call__(self) -> bool:
        return time.monotonic() < self._end

    def watch(self, best: float | None, bound: float, left: int) -> bool:
        """A search goes on until it has a plan, whatever the limit."""
        return best is None or self()
