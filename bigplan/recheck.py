"""A plan that was read, not made: held against its decisions before anything is done with it.

A file may have been edited, or written by another version of bigplan. Nothing that it promises is
taken at its word. Its strategy and placement must be legal, are lowered, verified and played again,
and the plan promises from then on what comes out of that. Only what the search said of other plans
stays as it was written: the bound, the model's gap, the rivals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path

from bigplan.capabilities import executable
from bigplan.cost import Costs
from bigplan.errors import InputError
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.planner import predict, programs_of, workload_of
from bigplan.program import Program
from bigplan.simulate import step_seconds, total_seconds
from bigplan.solve.candidate import Candidate, Placed, capacity_beside
from bigplan.solve.legality import require_legal_placement, require_legal_strategy
from bigplan.spec.sharing import WHOSE
from bigplan.units import format_bytes, format_seconds
from bigplan.verify import used_bytes, verify

SAME = 1e-9  # relative: the same numbers, added up in another order
NAMED = 3  # promises that a note names


@dataclass(frozen=True, slots=True)
class Rechecked:
    """A plan whose promises hold, and a sentence where they are not those that were written."""

    plan: Plan
    note: str = ""


def recheck(plan: Plan, path: Path) -> Rechecked:
    """The plan with the promises of its decisions; `path` is where it was read.

    Raises InputError where the decisions are not legal, or need more memory than there is.
    """
    try:
        _require_legal(plan)
        again = _promised_again(plan)
    except InputError as error:
        raise InputError(
            f"{path}: {error}; undo what was edited, or run `bigplan plan` again"
        ) from None
    stale = list(_differing(_promises(plan), _promises(again)))
    if not stale:
        return Rechecked(plan)
    before, after = plan.predicted.step_seconds, again.predicted.step_seconds
    more = f" and {len(stale) - NAMED} more" if len(stale) > NAMED else ""
    return Rechecked(
        again,
        f"{path}: its decisions do not give the {', '.join(stale[:NAMED])}{more} that it states "
        "(it was edited, or written by another version of bigplan), so its predictions are "
        f"recomputed: a step of {format_seconds(after)}; {format_seconds(before)} was written",
    )


def _require_legal(plan: Plan) -> None:
    workload = workload_of(plan)
    require_legal_strategy(workload, plan.strategy)
    graph = Candidate.of(workload, plan.strategy).graph
    require_legal_placement(workload, graph, plan.placement)


def _promised_again(plan: Plan) -> Plan:
    """The plan lowered, verified and played: every promise from its decisions alone."""
    workload = workload_of(plan)
    candidate, programs = programs_of(plan)
    graph, costs = candidate.graph, candidate.costs
    _require_memory(programs, costs)
    verify(programs, graph, capacity_beside(programs, costs), costs.sharing)
    seconds = step_seconds(programs, graph, costs)
    totals = total_seconds(programs, graph, costs)
    placed = Placed(candidate, plan.placement, seconds, seconds, totals, 0, programs)
    # Decisions that were pinned for the search and are not any more may beat its bound.
    bound = min(plan.predicted.lower_bound_seconds, seconds)
    predicted = predict(placed, workload, bound, plan.predicted.model_gap)
    runs = executable(plan.model, plan.training, plan.strategy, plan.cluster.group.gpu)
    return plan.model_copy(update={"predicted": predicted, "executable": runs})


def _require_memory(programs: Sequence[Program], costs: Costs) -> None:
    """Raise InputError that names the first memory that is too small, and by how much."""
    room = capacity_beside(programs, costs)
    for tier in Tier:
        used, capacity = used_bytes(programs, tier, costs.sharing), room[tier]
        if used > capacity:
            raise InputError(
                f"placement: needs {format_bytes(used)} of {tier} memory per {WHOSE[tier.scope]}, "
                f"{format_bytes(used - capacity)} more than the {format_bytes(capacity)} that the "
                "plan's cluster has for it"
            )


def _promises(plan: Plan) -> Mapping[str, object]:
    return plan.model_dump(mode="json", include={"predicted", "executable"})


def _differing(one: object, other: object, key: str = "") -> Iterator[str]:
    """Dotted keys whose values differ by more than rounding."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in dict.fromkeys((*one, *other)):
            path = f"{key}.{name}" if key else name
            yield from _differing(one.get(name), other.get(name), path)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from _differing(*pair, f"{key}.{number}")
    elif isinstance(one, float) and isinstance(other, float):
        if not isclose(one, other, rel_tol=SAME, abs_tol=SAME):
            yield key
    elif one != other:
        yield key
