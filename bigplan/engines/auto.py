"""Choice of an engine: the fastest by prediction of those that can run a request here and now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from bigplan.engines.engine import Engine
from bigplan.errors import InfeasibleError, InputError
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.solve.search import Watch
from bigplan.wear import require_wear


@dataclass(frozen=True, slots=True)
class Chosen:
    """The plan, each engine's best, and the planner's best, whether or not anything runs it.

    `by_engine` has for each installed engine a plan, or the reason why there is none. Where no
    engine has a plan, `plan` is the planner's best.
    """

    plan: Plan
    by_engine: Mapping[str, Plan | str]
    best: Plan


def choose(request: Request, engines: Iterable[Engine], best: Plan, watch: Watch) -> Chosen:
    """Plan for each engine. `best`: the planner's best plan, even if no engine executes it."""
    found: dict[str, Plan | str] = {}
    for engine in engines:
        if engine.missing() is None:
            found[engine.name] = _planned(request, engine, best, watch)
    plans = [plan for plan in found.values() if isinstance(plan, Plan)]
    fastest = min(plans, key=lambda plan: plan.predicted.step_seconds, default=best)
    return Chosen(fastest, found, best)


def _planned(request: Request, engine: Engine, best: Plan, watch: Watch) -> Plan | str:
    if best.engine == engine.name and best.executable[engine.name] is True:
        return best
    try:
        made = engine.make_plan(replace(request, engine=engine.name, exact=False), watch)
        return require_wear(made, request.max_wear)
    except (InfeasibleError, InputError) as error:
        return str(error)
