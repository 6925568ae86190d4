"""What a plan writes to NVMe, and how long the drives last."""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.plan import Plan
from bigplan.program import Lane
from bigplan.report.text import bytes_text, percent

DAY = 86400.0
NOTHING = 1 << 20  # bytes a step: no drive dies of that


@dataclass(frozen=True)
class Wear:
    """Bytes written on one node; `life_days` is None where no endurance is stated.

    `job_share`: part of the rated writes that the whole training takes, where its tokens are known.
    """

    bytes_per_step: int
    bytes_per_day: float
    drives: int
    life_days: float | None
    job_share: float | None = None

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
    if group.nvme.endurance is None:
        return Wear(written, a_day, group.nvme.drives, None)
    rated, tokens = group.nvme.endurance * group.nvme.drives, plan.training.tokens
    share = None if tokens is None else tokens / plan.training.tokens_per_step * written / rated
    return Wear(written, a_day, group.nvme.drives, rated / a_day, share)


def wear_text(wear: Wear) -> str:
    """The wear in one sentence."""
    last = "lasts" if wear.drives == 1 else "last"
    if wear.life_days is None:
        life = f"how long its {wear.named} {last} is unknown: endurance not stated"
    else:
        life = f"its {wear.named} {last} {days_text(wear.life_days)}"
    if wear.job_share is not None:
        life += f"; the whole training takes {percent(wear.job_share)} of the writes rated for"
    return (
        f"Each node writes {bytes_text(wear.bytes_per_step)} to NVMe a step, "
        f"{bytes_text(wear.bytes_per_day)} a day of training; {life}."
    )


def days_text(days: float) -> str:
    """Days, or from two years on years."""
    if days >= 730:
        return f"{days / 365:.3g} years"
    return "1 day" if f"{days:.3g}" == "1" else f"{days:.3g} days"
