"""What executes plans, behind one interface: engines are told apart here and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bigplan.collector import collected_rarely
from bigplan.engines.auto import Chosen, choose
from bigplan.engines.deepspeed import DeepSpeed
from bigplan.engines.engine import Engine
from bigplan.engines.frameworks import FRAMEWORKS
from bigplan.engines.mixed import Ways, best_mix, is_joined, is_mixed, recorded
from bigplan.engines.native import NativeEngine
from bigplan.engines.unequal import unequal_plan
from bigplan.errors import InputError
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.solve.search import Watch, unwatched
from bigplan.spec.cluster import NodeGroup
from bigplan.wear import require_wear

__all__ = ["ENGINES", "Chosen", "Engine", "chosen", "engine_of", "make_plan"]

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (NativeEngine(), DeepSpeed())}
# Tools that are planned for as well and that nothing here runs: "auto" tries none of them.
_PLANNED: dict[str, Engine] = {**ENGINES, **FRAMEWORKS}
# A request for "any" is for the planner's best plan, whether or not an engine executes it yet. That
# is a native plan, because the native space is the widest.
_BY_REQUEST = {"any": ENGINES["native"], **_PLANNED}


def engine_of(plan: Plan) -> Engine:
    """The engine that the plan is for. Raises InputError where this version lacks the engine."""
    if plan.engine not in _PLANNED:
        raise InputError(
            f"the plan is for the engine {plan.engine}; this version of bigplan has "
            f"{', '.join(_PLANNED)}: plan again"
        )
    return _PLANNED[plan.engine]


@collected_rarely()
def make_plan(request: Request, watch: Watch = unwatched) -> Plan:
    """The best plan for the engine that the request names. Raises as Engine.make_plan.

    Of a mixed cluster, which groups of nodes take part is a part of the plan.
    """
    if is_mixed(request.cluster) or is_joined(request.cluster):
        ways = Ways(
            equal=lambda one: make_plan(one, watch),
            unequal=partial(_unequal, watch),
            plan_of=lambda plan: plan,
            beside=lambda plan, equal: plan,
        )
        return recorded(*best_mix(request, ways))
    if request.engine == "auto":
        return chosen(request, watch).plan
    made = _BY_REQUEST[request.engine].make_plan(request, watch)
    return require_wear(made, request.max_wear)


@collected_rarely()
def chosen(request: Request, watch: Watch = unwatched) -> Chosen:
    """The fastest plan that can run here and now, and the plans that it was chosen from.

    Raises as Engine.make_plan where no engine's plan fits. Mixed clusters as in make_plan.
    """
    if is_mixed(request.cluster) or is_joined(request.cluster):
        ways = Ways(
            equal=lambda one: chosen(one, watch),
            unequal=partial(_unequal, watch),
            plan_of=lambda choice: choice.plan,
            beside=_beside,
        )
        found, tried = best_mix(request, ways)
        plan = recorded(found.plan, tried)
        others = {name: plan if p == found.plan else p for name, p in found.by_engine.items()}
        return replace(found, plan=plan, by_engine=others)
    best = _BY_REQUEST["any"].make_plan(replace(request, engine="any"), watch)
    return choose(replace(request, exact=False), ENGINES.values(), best, watch)


def _beside(plan: Plan, equal: Chosen | None) -> Chosen:
    """The plan with unequal work, beside the other engines' with equal work."""
    others = {} if equal is None else equal.by_engine
    return Chosen(plan, {**others, ENGINES["native"].name: plan}, plan)


def _unequal(watch: Watch, request: Request, groups: tuple[NodeGroup, ...]) -> Plan | None:
    """The plan in which each group has work of its own; None: equal work is as good, or all.

    bigplan's own runtime alone has ranks whose work is unequal.
    """
    native = ENGINES["native"]
    if request.engine not in ("any", "auto", native.name):
        return None
    if request.engine == "auto" and native.missing() is not None:
        return None
    made = unequal_plan(request, groups, watch)
    return None if made is None else require_wear(made, request.max_wear)
