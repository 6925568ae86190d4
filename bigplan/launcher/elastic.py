"""Plans for the nodes that there are: fewer where one was lost, more again when it is back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bigplan.engines import make_plan
from bigplan.errors import BigplanError
from bigplan.launcher.nodes import Node, fitting
from bigplan.launcher.placing import Layout, whole_node
from bigplan.launcher.record import Asked
from bigplan.plan import Plan
from bigplan.planner import Request

Settings = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Fewer:
    """A plan for so many nodes, and how long it took to find."""

    plan: Plan
    seconds: float


def usable(plan: Plan) -> tuple[Node, ...]:
    """The nodes that answer and are as large as the plan's, busy or not."""
    return fitting(whole_node(plan).bundle())


def enough(plan: Plan) -> bool:
    """Whether there are the nodes that the plan's ranks need, busy or not."""
    layout = Layout.of(plan)
    return len(fitting(layout.bundle())) >= layout.nodes


def planned_for(plan: Plan, asked: Asked, nodes: int) -> Fewer | None:
    """The best plan for at most so many nodes, of as many as there is one for.

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
    """The decisions of the user; on fewer nodes with fewer copies, or as many as are best."""
    fixed = dict(asked.set)
    if nodes == asked.nodes or "dp" not in fixed:
        yield fixed
        return
    copies, rest = divmod(int(fixed.pop("dp")) * nodes, asked.nodes)
    if copies and not rest:
        yield {**fixed, "dp": copies}
    yield fixed
