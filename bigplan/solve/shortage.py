"""Why nothing fits: which memory, how many bytes short, and the smallest change that would do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from bigplan.cost.price import ALLOCATOR_RESERVE
from bigplan.errors import InfeasibleError
from bigplan.placement import Tier
from bigplan.solve.candidate import MARGIN, Candidate, Workload, problem_of
from bigplan.solve.ilp import Shortage, shortages
from bigplan.solve.linear import Problem
from bigplan.solve.pins import Pin, rings_tried
from bigplan.units import format_bytes

TRIED = 24  # strategies asked; the most frugal come first
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
    remedies = sorted((s for s in whole if s is not None and s.nbytes > 0), key=_missing)
    if not remedies:
        return InfeasibleError(
            f"{workload.model.name} fits only with less than whole layers per tier; "
            "free a decision pinned with --set, or add a little memory"
        )
    least = remedies[0]
    options = "; or ".join(_remedy(workload, s) for s in remedies)
    where = "per GPU" if least.tier is Tier.GPU else "per node"
    return InfeasibleError(
        f"{workload.model.name} does not fit: {least.tier} memory is "
        f"{format_bytes(least.nbytes)} short {where} (stage {least.stage!r}). "
        f"Smallest change that fits: {options}",
        tier=str(least.tier),
        stage=least.stage,
        bytes_short=int(least.nbytes),
        remedy=options,
    )


def _whole_layers(tier: Tier, estimates: Iterable[tuple[Shortage, Problem]]) -> Shortage | None:
    """The least memory of `tier` that must be added for a plan of whole layers."""
    closest = sorted((e for e in estimates if e[0].tier is tier), key=lambda e: e[0].nbytes)
    best: Shortage | None = None
    for estimate, problem in closest[:CLOSEST]:
        if best is None or estimate.nbytes < best.nbytes:
            found = shortages(problem, (tier,), relaxed=False, margin=MARGIN)
            best = min([*found, *([best] if best else [])], key=_missing, default=None)
    return None if best is None else Shortage(best.stage, tier, _installed(tier, best.nbytes))


def _installed(tier: Tier, nbytes: float) -> int:
    """Memory that must be there for `nbytes` more to be usable."""
    usable = 1.0 - ALLOCATOR_RESERVE if tier is Tier.GPU else 1.0
    return ceil(nbytes / usable / STEP) * STEP


def _missing(shortage: Shortage) -> float:
    return shortage.nbytes


def _appetite(candidate: Candidate) -> tuple[int, int, int]:
    strategy = candidate.strategy
    group = strategy.micro_batch * strategy.accumulation_group
    return group, -strategy.tp * strategy.pp, -strategy.zero


def _remedy(workload: Workload, shortage: Shortage) -> str:
    nodes, more = workload.nodes, format_bytes(shortage.nbytes)
    if shortage.tier is Tier.GPU:
        return f"{more} more memory per GPU (now {format_bytes(nodes.gpu.memory)})"
    if shortage.tier is Tier.HOST:
        return f"{more} more host memory per node (now {format_bytes(nodes.host.memory)})"
    if nodes.nvme is None:
        return f"an NVMe drive with {more} per node (now none)"
    return f"{more} more NVMe per node (now {format_bytes(nodes.nvme.node_capacity)})"
