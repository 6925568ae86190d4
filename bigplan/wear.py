"""What a training writes to drives, compared with the writes that they are rated for."""

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
NOTHING = 1 << 20  # bytes a step that do not matter to any drive
MORE = 1 + 1e-3  # times: chunks of whole pages and rows write this much more than the model counts


@dataclass(frozen=True)
class Wear:
    """Writes to the drives of one node; `life_days` is None where no endurance is stated.

    `job_share` is the part of the rated writes that the training takes. It counts the whole
    training where its tokens are stated, else the `steps` that it runs.
    """

    bytes_per_step: int
    bytes_per_day: float
    drives: int
    life_days: float | None
    job_share: float | None = None
    steps: int | None = None  # None: `job_share` counts all tokens of the training

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
    """Optimizer steps of the training: those of all its tokens where stated, else `steps`.

    It is at least one step.
    """
    if training.tokens is None:
        return training.steps
    return max(1.0, training.tokens / training.tokens_per_step)


def allowed_bytes(share: float | None, training: Training, nodes: NodeGroup) -> float | None:
    """Bytes that a node may write a step if the training may take `share` of the rated writes.

    None: there is no limit, or the node has no drive. Raises InputError where the endurance of the
    drives is not stated.
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
    """The error; where the limit on wear is its cause, one that names this limit first."""
    allowed, whole = (allowed_bytes(part, training, nodes) for part in (share, 1.0))
    if error.written is None or allowed is None or whole is None:
        return error
    # Rounded up, because a plan must fit with the suggested value.
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
    """The share rounded up to three significant digits."""
    unit = 10.0 ** (floor(log10(share)) - 2)
    return ceil(share / unit) * unit


def require_wear(plan: Plan, share: float | None) -> Plan:
    """The plan. Raises InfeasibleError where it takes more than `share` of the rated writes."""
    wear = wear_of(plan)
    if share is None or wear is None or wear.job_share is None or wear.job_share <= share * MORE:
        return plan
    raise InfeasibleError(
        f"the best plan for {plan.engine} takes {wear.job_share:.3g} of the writes that the drives "
        f"are rated for, and max_wear is {share:g}; allow more, or add host memory"
    )
