"""A slightly larger global batch that splits over more GPUs: solved again, and what it brings.

The number of data-parallel ranks must divide both the batch and the number of GPUs. On 24 GPUs, 512
sequences allow only powers of two, at most 8 ranks; 528 sequences allow 24 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bigplan.engines import make_plan
from bigplan.errors import InfeasibleError, InputError
from bigplan.graph.strategy import Strategy
from bigplan.graph.strategy_space import divisors
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.solve.search import Watch, unwatched

LARGER = 1.1  # times the batch: a larger one would need other settings of the optimizer
WORTH = 0.03  # gain in tokens a second: a smaller one is not worth changing the training
TRIED = 2  # batches at most; those that split over most ranks come first


@dataclass(frozen=True, slots=True)
class LargerBatch:
    """A plan with more sequences a step; `gain` is its relative increase in tokens a second.

    `at_least`: the search was stopped, so a full search may gain more.
    """

    global_batch: int
    instead_of: int
    gain: float
    step_seconds: float
    strategy: Strategy
    at_least: bool


def batches_tried(batch: int, gpus: int) -> list[int]:
    """Batches up to a tenth larger, each divisible by a number of ranks that `batch` is not."""
    missed = [ranks for ranks in reversed(divisors(gpus)) if batch % ranks]
    larger = dict.fromkeys(-(-batch // ranks) * ranks for ranks in missed)
    return [found for found in larger if found <= LARGER * batch][:TRIED]


def larger_batch(
    request: Request, plan: Plan, watch: Watch = unwatched, *, first: bool = False
) -> LargerBatch | None:
    """The first batch whose plan has notably more tokens a second than `plan`.

    All GPUs must work on the batch. `first`: the search ends with the first plan that is worth it.
    None where no batch is worth it, or where `watch` stopped the search before it found one.
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
    """A watch that goes on while `watch` does and a step of at most `seconds` is still possible.

    `first`: it also stops once such a plan is found.
    """

    def go_on(best: float | None, bound: float, left: int) -> bool:
        found = first and best is not None and best <= seconds
        return watch(best, bound, left) and bound <= seconds and not found

    return go_on
