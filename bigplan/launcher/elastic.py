"""Plans for the nodes that are there: fewer if one was lost, more again when it is back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from bigplan.engines import make_plan
from bigplan.errors import BigplanError, LostError
from bigplan.graph.told import strategy_text
from bigplan.launcher.journal import Journal
from bigplan.launcher.nodes import Node
from bigplan.launcher.placing import Layout, whole_nodes
from bigplan.launcher.record import Asked
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.spec.experiment import LaunchSpec
from bigplan.units import counted

NODE_SECONDS = 600.0  # in which a machine starts again, or a cluster's manager brings another

Settings = Mapping[str, str | int | float]


class LaunchInProgress(Protocol):
    """A launch, as far as it matters here."""

    plan: Plan
    how: LaunchSpec
    journal: Journal
    asked: Asked

    @property
    def address(self) -> str | None:
        """The cluster's address; None: Ray is a local one, whose node is always there."""

    def say(self, text: str) -> None:
        """Tell the user."""

    def head_answers(self) -> bool:
        """Whether Ray can be asked. Raises WorkerError where its head is gone for good."""


@dataclass(frozen=True)
class Fewer:
    """A plan for so many nodes, and how long it took to find."""

    plan: Plan
    seconds: float


def usable(plan: Plan) -> tuple[Node, ...]:
    """The nodes that answer and are as large as the plan's, busy or not."""
    return whole_nodes(plan).fitting()


def enough(plan: Plan) -> bool:
    """Whether there are the nodes that the plan's ranks need, busy or not."""
    layout = Layout.of(plan)
    return len(layout.fitting()) >= layout.nodes


def planned_for(plan: Plan, asked: Asked, nodes: int) -> Fewer | None:
    """The best plan for the most nodes, up to so many, for which there is a plan.

    None: there is none. Training, caps and engine are those of `plan`.
    """
    begun = time.perf_counter()
    for number in range(min(nodes, asked.nodes), 0, -1):
        for settings in _settings(asked, number):
            try:
                cluster = plan.cluster.with_nodes(number)
                request = Request(plan.model, plan.training, cluster, settings, plan.engine)
                found = make_plan(request)
            except BigplanError:  # a batch that cannot be shared out so, too little memory
                continue
            return Fewer(found, time.perf_counter() - begun)
    return None


def _settings(asked: Asked, nodes: int) -> Iterator[Settings]:
    """The user's decisions; on fewer nodes `dp` shrinks, or the planner chooses it.

    It chooses `zero_group`, too, where the ranks that are left are no such groups.
    """
    fixed = dict(asked.set)
    if nodes == asked.nodes:
        yield fixed
        return
    ways = [fixed]
    if "dp" in fixed:
        copies, rest = divmod(int(fixed["dp"]) * nodes, asked.nodes)
        fewer = {**fixed, "dp": copies}
        without = {key: value for key, value in fixed.items() if key != "dp"}
        ways = [fewer, without] if copies and not rest else [without]
    for way in ways:
        yield way
        if "zero_group" in way:
            yield {key: value for key, value in way.items() if key != "zero_group"}


def find_nodes(run: LaunchInProgress, lost: BigplanError | None = None) -> None:
    """Return once there are nodes for the plan, or (if elastic) a plan for the nodes there are.

    Raises LostError where none comes, WorkerError where Ray's head is lost meanwhile.
    """
    if run.address is None:
        return
    end, told = time.monotonic() + NODE_SECONDS, False
    while not (run.head_answers() and (_adapted(run) if run.how.elastic else enough(run.plan))):
        if time.monotonic() > end:
            before = f"{lost}. " if lost else ""
            raise LostError(
                f"{before}No node has come in its place for {NODE_SECONDS:.0f} s; bring it back, "
                "or let the run go on with fewer nodes: --elastic"
            )
        if not told:
            told = True
            run.say(f"Waiting up to {NODE_SECONDS:.0f} s for a node in its place")
        time.sleep(1.0)


def _adapted(run: LaunchInProgress) -> bool:
    """Whether the plan is now for the nodes that there are."""
    there = len(usable(run.plan))
    nodes = Layout.of(run.plan).nodes
    if there == nodes or (there > nodes >= run.asked.nodes):
        return True
    found = planned_for(run.plan, run.asked, there)
    if found is None:
        return False
    if found.plan != run.plan:
        now = Layout.of(found.plan).nodes
        run.say(
            f"Planned again for {counted(now, 'node')} of {run.asked.nodes} in "
            f"{found.seconds:.1f} s: {strategy_text(found.plan.strategy)}"
        )
        _switch(run, found.plan, "a node was lost" if now < nodes else "a node is back")
    return True


def _switch(run: LaunchInProgress, plan: Plan, why: str) -> None:
    """Let the ranks that start next have another plan."""
    run.plan = plan
    run.journal.replan(plan, why)


def may_grow(run: LaunchInProgress) -> bool:
    """Whether a plan for more nodes can be had."""
    if run.address is None or not run.how.elastic:
        return False
    now = Layout.of(run.plan).nodes
    if now >= run.asked.nodes:
        return False
    there = len(usable(run.plan))
    found = planned_for(run.plan, run.asked, there) if there > now else None
    return found is not None and Layout.of(found.plan).nodes > now
