"""A training framework as an engine that plans: bigplan writes its files and never launches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bigplan.capabilities.splits import zero_group_refusal
from bigplan.engines.engine import require_plannable
from bigplan.engines.frameworks.price import PricedWay
from bigplan.engines.frameworks.search import FrameworkSearch
from bigplan.engines.frameworks.tool import Tool
from bigplan.engines.frameworks.way import Way
from bigplan.engines.shortage import short_text
from bigplan.errors import InputError, RefusedError
from bigplan.graph.strategy import Strategy
from bigplan.plan import Alternative, Plan, SearchRecord, digests, fullest
from bigplan.planner import Request
from bigplan.recheck import Rechecked, decisions_of, priced_again
from bigplan.solve.search import Watch
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training
from bigplan.timeline import Timeline

RIVALS = 5  # other strategies that a plan tells of


@dataclass(frozen=True, slots=True)
class FrameworkPlan:
    """What a tool can do, at the price that it has there."""

    tool: Tool
    worker: str = ""  # nothing here runs it

    @property
    def name(self) -> str:
        """See Engine."""
        return self.tool.name

    def refusal(self, model: ModelSpec, training: Training, strategy: Strategy) -> str | None:
        """See Engine; a tool is refused for whatever reason."""
        return self.missing()

    def missing(self) -> str | None:
        """See Engine."""
        return (
            f"bigplan plans for {self.name} and does not run it: write its configuration with "
            f"`bigplan config PLAN --for {self.name}`"
        )

    def prepare(self, plan: Plan, waiting: Callable[[str], None]) -> None:
        """See Engine."""
        raise RefusedError(str(self.missing()))

    def make_plan(self, request: Request, watch: Watch) -> Plan:
        """See Engine."""
        require_plannable(request, self.name, self.name)
        if why := self.tool.trains(request.model, request.training):
            raise RefusedError(f"{why}; change it, or plan with --engine any")
        search = FrameworkSearch(self.tool, request)
        if why := zero_group_refusal(search.wanted.fixed):
            raise RefusedError(why)
        found = search.run(watch)
        record = SearchRecord.of_all(search.counted, stopped=search.stopped)
        return self.plan_of(found[0], request, record, tuple(_alternatives(found)))

    def plan_of(
        self,
        priced: PricedWay,
        request: Request,
        search: SearchRecord,
        alternatives: tuple[Alternative, ...] = (),
    ) -> Plan:
        """A plan for a given way, whether or not it fits."""
        return Plan(
            inputs=digests(request.model, request.training, request.cluster),
            predicted=priced.predicted(),
            strategy=priced.way.strategy,
            placement=priced.way.placement(request.model, request.training),
            executable={self.name: str(self.missing())},
            search=search,
            alternatives=alternatives,
            model=request.model,
            training=request.training,
            cluster=request.cluster,
            engine=self.name,
        )

    def recheck(self, plan: Plan, path: Path) -> Rechecked:
        """See Engine."""
        way = Way.of(plan)
        with decisions_of(path):
            priced = self._priced(plan, way)
            self._require(plan, priced)
        again = plan.model_copy(update={"predicted": priced.predicted()})
        return priced_again(plan, again, path, "its promises")

    def _priced(self, plan: Plan, way: Way) -> PricedWay:
        request = Request(plan.model, plan.training, plan.cluster, engine=self.name)
        return FrameworkSearch(self.tool, request).priced(way)

    def _require(self, plan: Plan, priced: PricedWay) -> None:
        """Raise InputError where the tool does not do what the plan says."""
        way = priced.way
        if why := self.tool.refusal(plan.model, plan.training, plan.strategy):
            raise InputError(why)
        for problem in self.tool.problems(way, plan.model):
            raise InputError(f"placement: {problem}")
        if way.placement(plan.model, plan.training) != plan.placement:
            raise InputError(f"placement: it is none that {self.name} has")
        if priced.short:
            raise InputError(
                f"placement: needs {short_text(priced.short)} more than the plan's cluster has"
            )

    def timeline(self, plan: Plan) -> Timeline:
        """See Engine; the step part by part."""
        return self._priced(plan, Way.of(plan)).timeline()


def _alternatives(found: list[PricedWay]) -> Iterator[Alternative]:
    """The best of other strategies."""
    seen = {found[0].way.strategy}
    for priced in found:
        strategy = priced.way.strategy
        if strategy not in seen and len(seen) <= RIVALS:
            seen.add(strategy)
            yield Alternative(
                strategy=strategy,
                step_seconds=priced.seconds,
                parts=priced.step_parts(),
                memory=fullest(priced.predicted().memory),
            )
