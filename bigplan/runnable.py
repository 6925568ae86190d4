"""The best plan for a request that the runtime can execute today."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bigplan.engines import Chosen, engine_of, make_plan
from bigplan.errors import InfeasibleError, InputError
from bigplan.plan import Plan
from bigplan.planner import Request, refused_however_split
from bigplan.solve.search import Watch, unwatched


@dataclass(frozen=True, slots=True)
class Runnable:
    """The best plan that can be run, if any.

    `refusal` is why the planner's best plan cannot be run; empty: it can be run. `because` is why
    the search for another plan found none. It is empty where `refusal` holds for every plan of the
    request, or where another plan was found.
    """

    plan: Plan | None
    refusal: str = ""
    because: str = ""
    chosen: Chosen | None = None  # where the request left the engine open


def best_runnable(request: Request, best: Plan, watch: Watch = unwatched) -> Runnable:
    """The request's best plan if it can be run, else the best plan of those that can be run.

    `watch` sees the second search.
    """
    refusal = best.executable[best.engine]
    if refusal is True:
        return Runnable(best)
    if not engine_of(best).worker:  # the user asked for an engine that bigplan cannot run
        return Runnable(None, str(refusal))
    if always := refused_however_split(request):
        return Runnable(None, always)
    try:
        found = make_plan(replace(request, engine="native"), watch)
    except (InfeasibleError, InputError) as error:
        return Runnable(None, str(refusal), str(error))
    return Runnable(found, str(refusal))
