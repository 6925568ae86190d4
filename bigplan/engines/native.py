"""bigplan's own runtime as an engine: layer by layer, on every tier, by programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bigplan.capabilities.native import native_refusal
from bigplan.graph.strategy import Strategy
from bigplan.installed import LAUNCH, missing
from bigplan.plan import Plan
from bigplan.planner import Request, make_plan, simulate_plan
from bigplan.recheck import Rechecked, recheck
from bigplan.solve.search import Watch
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class NativeEngine:
    """The engine of the planner's whole space; capabilities/native.py has the part that runs."""

    name: str = "native"
    worker: str = "bigplan.runtime.worker:NativeWorker"

    def refusal(self, model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
        """See Engine."""
        return native_refusal(model, training, strategy)

    def missing(self) -> str | None:
        """See Engine."""
        return missing(LAUNCH, "launch")

    def prepare(self, plan: Plan, waiting: Callable[[str], None]) -> None:
        """See Engine; ranks compile for themselves, which takes seconds."""

    def make_plan(self, request: Request, watch: Watch) -> Plan:
        """See Engine; a request for any engine includes strategies that nobody executes yet."""
        return make_plan(request, watch)

    def recheck(self, plan: Plan, path: Path) -> Rechecked:
        """See Engine."""
        return recheck(plan, path)

    def timeline(self, plan: Plan) -> Timeline:
        """See Engine; the step action by action."""
        return simulate_plan(plan)
