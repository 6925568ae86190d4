"""What an engine is: something that executes plans, with its own limits, decisions and price."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bigplan.capabilities.other_tools import other_tools_refusal
from bigplan.capabilities.splits import expert_parallel_refusal
from bigplan.errors import RefusedError
from bigplan.graph.strategy import Strategy
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.recheck import Rechecked
from bigplan.solve.search import Watch
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.timeline import Timeline


def require_plannable(request: Request, engine: str, tool: str) -> None:
    """Raise RefusedError for what is planned for our own runtime alone; `tool`: the engine's."""
    if request.exact:
        raise RefusedError(
            f"--exact: with --engine {engine} every way is tried anyway; leave it out"
        )
    if why := other_tools_refusal(request.model, request.training, tool):
        raise RefusedError(why)
    if why := expert_parallel_refusal(request.settings.get("ep", 1), request.model, tool):
        raise RefusedError(why)


class Engine(Protocol):
    """The interface that planner, reports and launcher use; they know no engine by name."""

    @property
    def name(self) -> str:
        """The name in `--engine` and in a plan's `engine`."""

    @property
    def worker(self) -> str:
        """ "module:class" of one rank's worker (launcher.actor.WorkerType).

        The class is imported in the rank's own process, because the planner half imports no torch.
        An empty string means that bigplan plans for the engine and never runs it.
        """

    def refusal(self, model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
        """Why the engine cannot execute this request; None: it can."""

    def missing(self) -> str | None:
        """The package that this machine lacks, with its installation; None: nothing is missing.

        For a tool that bigplan does not run, this says so and how to write its configuration.
        """

    def prepare(self, plan: Plan, waiting: Callable[[str], None]) -> None:
        """Do once, before any rank starts, what takes long on this machine.

        `waiting` is called with progress messages. Raises PreflightError.
        """

    def make_plan(self, request: Request, watch: Watch) -> Plan:
        """The fastest plan that the engine can execute, priced as the engine behaves.

        Raises InputError, RefusedError, InfeasibleError.
        """

    def recheck(self, plan: Plan, path: Path) -> Rechecked:
        """The plan that was read from `path`, with promises made anew from its decisions.

        Raises InputError where the decisions are not legal, or need more memory than there is.
        """

    def timeline(self, plan: Plan) -> Timeline:
        """The plan's steady step, at the grain that its worker measures."""
