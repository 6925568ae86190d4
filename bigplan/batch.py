"""A slightly larger global batch that splits over more GPUs: solved again, and what it brings.

Data-parallel ranks must divide the batch, and their number the GPUs. 512 sequences on 24 GPUs leave
a plan the powers of two; with 528 it may have 24 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bigplan.engines import make_plan
from bigplan.errors import InfeasibleError, InputError
from bigplan.graph.strategy import Strategy, divisors
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.solve.search import Watch, unwatched

LARGER = 1.1  # times the batch: with more the optimizer's settings would have to change
WORTH = 0.03  # of tokens a second: less is not worth a change of the training
TRIED = 2  # batches, those that most ranks divide first


@dataclass(frozen=True, slots=True)
class LargerBatch:
    """A plan with more sequences a step; `gain` is what it has more of tokens a second.

    `at_least`: its search was stopped, so that it may gain more.
    """

    global_batch: int
    instead_of: int
    gain: float
    step_seconds: float
    strategy: Strategy
    at_least: bool


def batches_tried(batch: int, gpus: int) -> list[int]:
    """Batches up to a tenth larger that numbers of ranks divide which do not divide this one."""
    missed = [ranks for ranks in reversed(divisors(gpus)) if batch % ranks]
    larger = dict.fromkeys(-(-batch // ranks) * ranks for ranks in missed)
    return [found for found in larger if found <= LARGER * batch][:TRIED]


def larger_batch(
    request: Request, plan: Plan, watch: Watch = unwatched, *, first: bool = False
) -> LargerBatch | None:
    """The first batch with notably more tokens a second than the request's own plan has.

    All GPUs work on it. `first`: its search ends with the first plan that is worth it. None where
    there is none, or `watch` stopped the search before one was found.
    """
    now = request.training.global_batch
    batches = [] if "dp" in request.settings else batches_tried(now, request.cluster.gpus)
    for batch in batches:
        training = request.training.model_copy(update={"global_batch": batch})
        ratio = batch / now
        enough = ratio * plan.predicted.step_seconds / (1 + WORTH)
        try:
            asked = replace(request, training=training, idling=False, told=False)
            made = make_plan(asked, _hopeful(watch, enough, first=first))
        except (InfeasibleError, InputError):
            continue
        seconds = made.predicted.step_seconds
        if seconds <= enough:
            gain = ratio * plan.predicted.step_seconds / seconds - 1
            return LargerBatch(batch, now, gain, seconds, made.strategy, made.search.stopped)
    return None


def _hopeful(
    watch: Watch, seconds: float, *, first: bool
) -> Callable[[float | None, float, int], bool]:
    """Goes on as `watch` does, and while a plan may take no longer than so many seconds.

    `first`: no further once one is found.
    """

    def go_on(best: float | None, bound: float, left: int) -> bool:
        found = first and best is not None and best <= seconds
        return watch(best, bound, left) and bound <= seconds and not found

    return go_on
