"""What an engine is: something that executes plans, with its own limits, decisions and price."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from bigplan.graph.strategy import Strategy
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.recheck import Rechecked
from bigplan.solve.search import Watch
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.timeline import Timeline


class Engine(Protocol):
    """Asked by planner, reports and launcher, which know no engine by name."""

    @property
    def name(self) -> str:
        """As in `--engine` and in a plan's `engine`."""

    @property
    def worker(self) -> str:
        """ "module:class" of one rank's worker (launcher.actor.WorkerType).

        The class is imported in the rank's own process: the planner half imports no torch. Empty:
        bigplan plans for the engine and never runs it.
        """

    def refusal(self, model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
        """Why it cannot execute this; None: it can."""

    def missing(self) -> str | None:
        """The package that this machine lacks for it, and how to install it; None: nothing.

        Of what bigplan plans for and does not run: that, and how to write its configuration.
        """

    def prepare(self, plan: Plan, waiting: Callable[[str], None]) -> None:
        """Do on this machine what takes long and is done once, before any rank starts.

        `waiting` is told of it as time passes. Raises PreflightError.
        """

    def make_plan(self, request: Request, watch: Watch) -> Plan:
        """The fastest plan of all that it can place, priced as it behaves.

        Raises InputError, RefusedError, InfeasibleError.
        """

    def recheck(self, plan: Plan, path: Path) -> Rechecked:
        """A plan that was read from `path`, with the promises of its decisions.

        Raises InputError where the decisions are not legal, or need more memory than there is.
        """

    def timeline(self, plan: Plan) -> Timeline:
        """The plan's steady step, at the grain that its worker measures."""
