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

    @property
    def named(self) -> str:
        """The drives in words."""
        return "drive" if self.drives == 1 else f"{self.drives} drives"


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
    last = "lasts" if wear.drives == 1 else "last"
    if wear.life_days is None:
        life = f"how long its {wear.named} {last} is unknown: endurance not stated"
    else:
        life = f"its {wear.named} {last} {days_text(wear.life_days)}"
    return (
        f"Each node writes {bytes_text(wear.bytes_per_step)} to NVMe a step, "
        f"{bytes_text(wear.bytes_per_day)} a day of training; {life}."
    )


def days_text(days: float) -> str:
    """Days, or from two years on years."""
    if days >= 730:
        return f"{days / 365:.3g} years"
    return "1 day" if f"{days:.3g}" == "1" else f"{days:.3g} days"
