"""Why nothing fits: which memory, how many bytes short, and the smallest change that would do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

from bigplan.cost.price import ALLOCATOR_RESERVE
from bigplan.errors import InfeasibleError
from bigplan.placement import Tier
from bigplan.solve.candidate import Candidate, Workload
from bigplan.solve.formulation import WEAR
from bigplan.solve.ilp import Shortage, excess, shortages
from bigplan.solve.linear import Capacity, Problem
from bigplan.solve.memory import GIB
from bigplan.solve.pins import WRITTEN, Pin, rings_tried
from bigplan.solve.resolve import problem_of
from bigplan.units import format_bytes

TRIED = 32  # strategies asked; the most frugal come first
CLOSEST = 4  # of them, per tier, asked again for whole layers
STEP = 1 << 20  # shortages are told in whole MiB: rows and pages round by less


def infeasible(
    workload: Workload, candidates: Sequence[Candidate], pins: tuple[Pin, ...]
) -> InfeasibleError:
    """The error that names the least that is missing over the most frugal strategies."""
    rings = rings_tried(pins)[-1]
    problems = [problem_of(c, pins, rings) for c in sorted(candidates, key=_appetite)[:TRIED]]
    estimates = [(s, problem) for problem in problems for s in shortages(problem)]
    whole = (_whole_layers(tier, estimates) for tier in Tier)
    alone = sorted((s for s in whole if s is not None and s.nbytes > 0), key=_missing)
    changes = [(s,) for s in alone] or _together(problems)
    written = _written(problems, pins)
    if not changes:
        why, remedy = "only with less than whole layers per tier", ", or add a little memory"
        if pins and not estimates:
            why, remedy = "no memory, however large: decisions contradict each other", ""
        return InfeasibleError(
            f"{workload.model.name} fits {why}; free a decision pinned with --set{remedy}",
            written=written,
        )
    options = "; or ".join(" and ".join(_remedy(workload, s) for s in c) for c in changes)
    least = max(changes[0], key=_missing)
    return InfeasibleError(
        f"{workload.model.name} does not fit: {' and '.join(map(_told, changes[0]))}. "
        f"Smallest change that fits: {options}",
        tier=str(least.tier),
        stage=least.stage,
        bytes_short=int(least.nbytes),
        remedy=options,
        written=written,
    )


def _written(problems: Sequence[Problem], pins: tuple[Pin, ...]) -> float | None:
    """Bytes that a node must write to its drives in a step for a plan to fit.

    None where nothing limits them, or where nothing fits with any number of them.
    """
    limits = [pin.amount or 0.0 for pin in pins if pin.tensor == WRITTEN]
    if not limits:
        return None
    estimates = [(found, p) for p in problems if (found := excess(p, WEAR)) is not None]
    closest = sorted(estimates, key=lambda estimate: estimate[0])[:CLOSEST]
    whole = [excess(problem, WEAR, relaxed=False) for _, problem in closest]
    least = min((found for found in whole if found is not None), default=None)
    return None if least is None else min(limits) + least * GIB


def _told(shortage: Shortage) -> str:
    where = "per GPU" if shortage.tier is Tier.GPU else "per node"
    missing = format_bytes(shortage.nbytes)
    return f"{shortage.tier} memory is {missing} short {where} (stage {shortage.stage!r})"


def _whole_layers(tier: Tier, estimates: Iterable[tuple[Shortage, Problem]]) -> Shortage | None:
    """The least memory of `tier` that must be added for a plan of whole layers."""
    closest = sorted((e for e in estimates if e[0].tier is tier), key=lambda e: e[0].nbytes)
    best: Shortage | None = None
    for estimate, problem in closest[:CLOSEST]:
        if best is None or estimate.nbytes < best.nbytes:
            found = shortages(problem, (tier,), relaxed=False)
            best = min([*found, *([best] if best else [])], key=_missing, default=None)
    return None if best is None else Shortage(best.stage, tier, _installed(tier, best.nbytes))


def _together(problems: Sequence[Problem]) -> list[tuple[Shortage, ...]]:
    """The least of several memories at once, where pins need more of each; none: nothing helps."""
    found = [every for problem in problems[:CLOSEST] if (every := _in_turn(problem))]
    return sorted(found, key=lambda every: sum(map(_missing, every)))[:1]


def _in_turn(problem: Problem) -> tuple[Shortage, ...]:
    """What is missing of every tier, those before it grown and those after it without end."""
    found: list[Shortage] = []
    rows: tuple[Capacity, ...] = ()
    for tier in Tier:
        own = tuple(row for row in problem.capacities if row.tier is tier)
        asked = replace(problem, capacities=rows + own)
        short = shortages(asked, (tier,), relaxed=False)
        if not short:
            return ()
        rows += tuple(replace(row, limit=row.limit + short[0].nbytes) for row in own)
        found.append(Shortage(short[0].stage, tier, _installed(tier, short[0].nbytes)))
    return tuple(s for s in found if s.nbytes > 0)


def _installed(tier: Tier, nbytes: float) -> int:
    """Memory that must be there for `nbytes` more to be usable."""
    usable = 1.0 - ALLOCATOR_RESERVE if tier is Tier.GPU else 1.0
    return ceil(nbytes / usable / STEP) * STEP


def _missing(shortage: Shortage) -> float:
    return shortage.nbytes


def _appetite(candidate: Candidate) -> tuple[int, int, int]:
    """The most frugal first.

    A layer that all micro-batches pass at once ends its gradient before the next layer begins one,
    which may save as much as micro-batches that pass all layers one by one.
    """
    strategy, units = candidate.strategy, candidate.graph.units
    group = strategy.micro_batch * min(strategy.accumulation_group, units)
    return group, -strategy.tp * strategy.pp, -strategy.zero


def _remedy(workload: Workload, shortage: Shortage) -> str:
    nodes, more = workload.nodes, format_bytes(shortage.nbytes)
    if shortage.tier is Tier.GPU:
        return f"{more} more memory per GPU (now {format_bytes(nodes.gpu.memory)})"
    if shortage.tier is Tier.HOST:
        now = format_bytes(nodes.host.tensor_memory or nodes.host.memory)
        return f"{more} more host memory per node (now {now})"
    if nodes.nvme is None:
        return f"an NVMe drive with {more} per node (now none)"
    return f"{more} more NVMe per node (now {format_bytes(nodes.nvme.node_capacity)})"
