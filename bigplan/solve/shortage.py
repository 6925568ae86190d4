"""Why nothing fits: which memory, how many bytes short, and the smallest change that would do."""

from __future__ import annotations

from collections.abc import Sequence

from bigplan.errors import InfeasibleError
from bigplan.placement import Tier
from bigplan.solve.candidate import Candidate, Workload, problem_of
from bigplan.solve.ilp import Shortage, shortages
from bigplan.solve.pins import Pin
from bigplan.units import format_bytes

TRIED = 24  # strategies asked; the most frugal come first


def infeasible(
    workload: Workload, candidates: Sequence[Candidate], pins: tuple[Pin, ...]
) -> InfeasibleError:
    """The error that names the least that is missing over the most frugal strategies."""
    frugal = sorted(candidates, key=_appetite)[:TRIED]
    found = [s for c in frugal for s in shortages(problem_of(c, pins)) if s.nbytes > 0]
    if not found:
        return InfeasibleError(
            f"{workload.model.name} fits only with less than whole layers per tier; "
            "free a decision pinned with --set, or add a little memory"
        )
    remedies = {tier: min((s for s in found if s.tier is tier), key=_missing) for tier in Tier
                if any(s.tier is tier for s in found)}
    least = min(remedies.values(), key=_missing)
    options = "; or ".join(_remedy(workload, s) for s in sorted(remedies.values(), key=_missing))
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
