"""What a training writes to drives, beside what they are rated for."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10

from bigplan.errors import InfeasibleError, InputError
from bigplan.plan import Plan
from bigplan.program import Lane
from bigplan.spec.cluster import NodeGroup
from bigplan.spec.training import Training
from bigplan.units import format_bytes

DAY = 86400.0
NOTHING = 1 << 20  # bytes a step: no drive dies of that
MORE = 1 + 1e-3  # chunks of whole pages and rows write so much more than a plan counts on


@dataclass(frozen=True)
class Wear:
    """Bytes written on one node; `life_days` is None where no endurance is stated.

    `job_share`: part of the rated writes that the training takes: all of it, where its tokens are
    known, else the `steps` that it runs.
    """

    bytes_per_step: int
    bytes_per_day: float
    drives: int
    life_days: float | None
    job_share: float | None = None
    steps: int | None = None  # None: all of its tokens are counted

    @property
    def named(self) -> str:
        """The drives in words."""
        return "drive" if self.drives == 1 else f"{self.drives} drives"


def wear_of(plan: Plan) -> Wear | None:
    """The wear of a node's drives; None: the plan writes next to nothing to them."""
    group = plan.cluster.group
    sharing = group.shared_by(plan.strategy.ranks)
    written = sharing.counted(plan.predicted.moved_bytes.get(Lane.NVME_WRITE, 0), "node")
    if written < NOTHING or group.nvme is None:
        return None
    a_day = written / plan.predicted.step_seconds * DAY
    rated, training = group.nvme.node_endurance, plan.training
    if rated is None:
        return Wear(written, a_day, group.nvme.drives, None)
    share = steps_of(training) * written / rated
    steps = training.steps if training.tokens is None else None
    return Wear(written, a_day, group.nvme.drives, rated / a_day, share, steps)


def steps_of(training: Training) -> float:
    """Optimizer steps of the training: all of its tokens where they are known, else what it runs.

    Less than one step is one.
    """
    if training.tokens is None:
        return training.steps
    return max(1.0, training.tokens / training.tokens_per_step)


def allowed_bytes(share: float | None, training: Training, nodes: NodeGroup) -> float | None:
    """Bytes that a node may write a step if the job may take this share of the rated writes.

    None: any number, as nothing is limited or there is no drive. Raises InputError where the
    drive's endurance is not stated.
    """
    if share is None or nodes.nvme is None:
        return None
    if nodes.nvme.node_endurance is None:
        raise InputError(
            f"max_wear is {share:g}, but the cluster does not state the endurance of its drives; "
            "add it, such as --hardware nvme.endurance='1.2 PB', or leave max_wear out"
        )
    return share * nodes.nvme.node_endurance / steps_of(training)


def worn_out(
    error: InfeasibleError, share: float, training: Training, nodes: NodeGroup
) -> InfeasibleError:
    """The same error with the limit on wear told first, where that is why nothing fits."""
    allowed, whole = (allowed_bytes(part, training, nodes) for part in (share, 1.0))
    if error.written is None or allowed is None or whole is None:
        return error
    # Rounded up, for a plan has to fit with what is told.
    enough = _rounded_up(error.written * MORE / whole)
    remedy = f"--max-wear {enough:g}" + (f"; or {error.remedy}" if error.remedy else "")
    return InfeasibleError(
        f"max_wear {share:g} lets each node write {format_bytes(round(allowed))} a step to its "
        f"drives, and nothing fits that writes less than {format_bytes(round(error.written))}. "
        f"Smallest change that fits: {remedy}",
        tier=error.tier,
        stage=error.stage,
        bytes_short=error.bytes_short,
        remedy=remedy,
        written=error.written,
    )


def _rounded_up(share: float) -> float:
    """With three digits, no less."""
    unit = 10.0 ** (floor(log10(share)) - 2)
    return ceil(share / unit) * unit


def require_wear(plan: Plan, share: float | None) -> Plan:
    """The plan, where it wears drives no more. Raises InfeasibleError."""
    wear = wear_of(plan)
    if share is None or wear is None or wear.job_share is None or wear.job_share <= share * MORE:
        return plan
    raise InfeasibleError(
        f"the best plan for {plan.engine} takes {wear.job_share:.3g} of the writes that the drives "
        f"are rated for, and max_wear is {share:g}; allow more, or add host memory"
    )
