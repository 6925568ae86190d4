"""Check a plan that was read from a file, and compute its predictions again.

A file may have been edited, or written by another version of bigplan, so its predictions are not
trusted. Strategy and placement must be legal. They are lowered, verified and simulated again, and
the results replace the predictions in the file. Only the search's results about other plans are
kept: the bound, the model gap and the alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path

from bigplan.capabilities.native import executable
from bigplan.cost import Costs
from bigplan.errors import InputError
from bigplan.pace import group_steps, workload_of
from bigplan.placement import Tier
from bigplan.plan import Plan, as_groups, mfu_of
from bigplan.planner import memory_of_groups, predict, programs_of, seen
from bigplan.program import Program
from bigplan.simulate import step_seconds, total_seconds
from bigplan.solve.candidate import Candidate, Placed, capacity_beside
from bigplan.solve.legality import require_legal_placement, require_legal_strategy
from bigplan.spec.sharing import WHOSE
from bigplan.units import format_bytes, format_seconds
from bigplan.verify import used_bytes, verify

SAME = 1e-9  # relative and absolute: sums of equal numbers in another order differ by less
NAMED = 3  # at most so many predictions are named in a note


@dataclass(frozen=True, slots=True)
class Rechecked:
    """A plan with correct predictions, and a note where the file had other predictions."""

    plan: Plan
    note: str = ""


@contextmanager
def decisions_of(path: Path) -> Iterator[None]:
    """While decisions of a file are looked at: an InputError names the file, and what to do."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"{path}: {error}; undo what was edited, or run `bigplan plan` again"
        ) from None


def priced_again(plan: Plan, again: Plan, path: Path, computed: str) -> Rechecked:
    """Of an engine that prices by closed forms; `computed`: what is told to be `again`'s."""
    if again == plan:
        return Rechecked(plan)
    return Rechecked(
        again,
        f"{path}: its decisions do not give all that it states (it was edited, or written by "
        f"another version of bigplan), so {computed} are computed again: a step of "
        f"{format_seconds(again.predicted.step_seconds)}; "
        f"{format_seconds(plan.predicted.step_seconds)} was written",
    )


def recheck(plan: Plan, path: Path) -> Rechecked:
    """The plan with predictions computed from its decisions; `path` is the file it was read from.

    Raises InputError where the decisions are not legal, or need more memory than there is.
    """
    with decisions_of(path):
        _require_legal(plan)
        again = promised_again(plan)
    stale = list(_differing(_promises(plan), _promises(again)))
    if not stale:
        return Rechecked(plan)
    before, after = (format_seconds(one.predicted.step_seconds) for one in (plan, again))
    written = f"; {before} was written" if before != after else ", as was written, to these digits"
    more = f" and {len(stale) - NAMED} more" if len(stale) > NAMED else ""
    return Rechecked(
        again,
        f"{path}: its decisions do not give the {', '.join(stale[:NAMED])}{more} that it states "
        "(it was edited, or written by another version of bigplan), so its predictions are "
        f"recomputed: a step of {after}{written}",
    )


def _require_legal(plan: Plan) -> None:
    _require_whole_groups(plan)
    views = as_groups(plan)
    for view in views:
        require_legal_strategy(workload_of(view), view.strategy)
    largest = max(views, key=lambda view: view.strategy.micro_batch)
    workload = workload_of(largest)
    graph = Candidate.of(workload, largest.strategy).graph
    require_legal_placement(workload, graph, plan.placement)


def _require_whole_groups(plan: Plan) -> None:
    """Raise InputError where replicas of unlike sizes are not those of the plan's groups."""
    strategy, cluster = plan.strategy, plan.cluster
    members = [member for member in cluster.members or () if member.figures is not None]
    if not strategy.replicas and not members:
        return
    each = cluster.group.gpus_per_node
    have = [group.number * strategy.ranks // strategy.dp for group in strategy.replicas]
    need = [member.nodes * each for member in members]
    uneven = any(member.nodes % strategy.pp for member in members)
    if (
        have != need
        or uneven
        or strategy.sequences * strategy.micro_batches(plan.training) != plan.training.global_batch
    ):
        raise InputError(
            f"strategy.replicas: groups of {', '.join(map(str, have)) or 'no'} GPUs; the plan's "
            f"cluster has groups of {', '.join(map(str, need)) or 'none'}, the number of whose "
            f"nodes pp {strategy.pp} must divide, and all replicas' micro-batches together must "
            f"divide the global batch of {plan.training.global_batch}"
        )


def promised_again(plan: Plan) -> Plan:
    """The plan lowered, verified and simulated, with every prediction from its decisions alone.

    Raises InputError where a memory of its cluster is too small.
    """
    steps = group_steps(plan) if plan.strategy.replicas else ()
    candidate, programs = programs_of(plan)
    graph, costs = candidate.graph, candidate.costs
    for one, its in [(s.candidate, s.programs) for s in steps] or [(candidate, programs)]:
        _require_memory(its, one.costs)
        verify(its, one.graph, capacity_beside(its, one.costs), one.costs.sharing)
    seconds = step_seconds(programs, graph, costs)
    totals = total_seconds(programs, graph, costs)
    placed = Placed(candidate, plan.placement, seconds, seconds, totals, 0, programs)
    # The bound is of a search under the user's pins. An edited plan may break a pin and be faster.
    bound = min(plan.predicted.lower_bound_seconds, seconds)
    workload = replace(workload_of(seen(plan)), training=plan.training)
    predicted = predict(placed, workload, bound, plan.predicted.model_gap)
    if steps:
        known = {"mfu": mfu_of(plan, seconds), "memory": tuple(memory_of_groups(steps))}
        predicted = predicted.model_copy(update=known)
    every = [
        executable(v.model, v.training, v.strategy, v.cluster.group.gpu) for v in as_groups(plan)
    ]
    runs = min(every, key=lambda one: one["native"] is True)
    return plan.model_copy(update={"predicted": predicted, "executable": runs})


def _require_memory(programs: Sequence[Program], costs: Costs) -> None:
    """Raise InputError where a memory is too small, with the number of missing bytes."""
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
