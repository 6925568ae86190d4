"""What a training writes to drives, beside what they are rated for."""

from __future__ import annotations

from dataclasses import dataclass

from bigplan.errors import InfeasibleError, InputError
from bigplan.plan import Plan
from bigplan.program import Lane
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.training import Training

DAY = 86400.0
NOTHING = 1 << 20  # bytes a step: no drive dies of that
MORE = 1 + 1e-3  # chunks of whole pages and rows write so much more than a plan counts on


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


def allowed_bytes(share: float | None, training: Training, nodes: NodeGroup) -> float | None:
    """Bytes that a node may write a step if the job may take this share of the rated writes.

    None: any number, as nothing is limited or there is no drive. Raises InputError where the
    drive's endurance is not stated.
    """
    if share is None or nodes.nvme is None:
        return None
    if nodes.nvme.endurance is None:
        raise InputError(
            f"max_wear is {share:g}, but the cluster does not state the endurance of its drives; "
            "add it, such as --hardware nvme.endurance='1.2 PB', or leave max_wear out"
        )
    steps = (training.tokens or training.tokens_per_step) / training.tokens_per_step
    return share * nodes.nvme.endurance * nodes.nvme.drives / max(1.0, steps)


def require_wear(plan: Plan, share: float | None) -> Plan:
    """The plan, where it wears drives no more. Raises InfeasibleError."""
    wear = wear_of(plan)
    if share is None or wear is None or wear.job_share is None or wear.job_share <= share * MORE:
        return plan
    raise InfeasibleError(
        f"the best plan for {plan.engine} takes {wear.job_share:.3g} of the writes that the drives "
        f"are rated for, and max_wear is {share:g}; allow more, or add host memory"
    )
