"""What a plan writes to NVMe, and how long the drives last."""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.plan import Plan
from bigplan.program import Lane
from bigplan.report.text import bytes_text

DAY = 86400.0
NOTHING = 1 << 20  # bytes a step: no drive dies of that


@dataclass(frozen=True)
class Wear:
    """Bytes written on one node; `life_days` is None where no endurance is stated."""

    bytes_per_step: int
    bytes_per_day: float
    drives: int
    life_days: float | None


def wear_of(plan: Plan) -> Wear | None:
    """The wear of a node's drives; None: the plan writes next to nothing to them."""
    group = plan.cluster.group
    ranks = min(plan.strategy.ranks, group.gpus_per_node)
    written = plan.predicted.moved_bytes.get(Lane.NVME_WRITE, 0) * ranks
    if written < NOTHING or group.nvme is None:
        return None
    a_day = written / plan.predicted.step_seconds * DAY
    endurance = group.nvme.endurance
    life = None if endurance is None else endurance * group.nvme.drives / a_day
    return Wear(written, a_day, group.nvme.drives, life)


def wear_text(wear: Wear) -> str:
    """The wear in one sentence."""
    drives = "its drive" if wear.drives == 1 else f"its {wear.drives} drives"
    last = "" if wear.drives == 1 else "s"
    if wear.life_days is None:
        life = f"how long {drives} last{'s' if not last else ''} is unknown: endurance not stated"
    else:
        life = f"{drives} last{'s' if not last else ''} {_days(wear.life_days)}"
    return (
        f"Each node writes {bytes_text(wear.bytes_per_step)} to NVMe a step, "
        f"{bytes_text(wear.bytes_per_day)} a day of training; {life}."
    )


def _days(days: float) -> str:
    return f"{days:.3g} days" if days < 730 else f"{days / 365:.3g} years"
