"""One experiment's result: the request, the plan and its cost, or why there is none."""

from __future__ import annotations

from typing import Any, Literal

from bigplan.bill import DAY, MILLION, Bill, bill_of
from bigplan.graph.told import strategy_text
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.spec.files.document import Spec
from bigplan.wear import wear_of

RowStatus = Literal["planned", "failed"]


class StudyRow(Spec):
    """A line of the results; unknown or unrequested figures are None.

    Nothing in it depends on when, where or beside which others it was planned.
    """

    status: RowStatus
    reason: str = ""
    """why there is no plan"""
    found: int | None = None
    """the largest value that fits, where one was looked for"""
    model: str | None = None
    parameters: int | None = None
    cluster: str | None = None
    nodes: int | None = None
    gpus: int | None = None
    engine: str | None = None
    runs: bool | None = None
    """whether that engine can execute the plan"""
    strategy: str | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    tokens_per_step: int | None = None
    step_seconds: float | None = None
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    bottleneck: str | None = None
    gpu_bytes: int | None = None
    """of the fullest GPU"""
    host_bytes: int | None = None
    """of the fullest node, processes included"""
    nvme_bytes: int | None = None
    drive_bytes_per_million_tokens: float | None = None
    """written on all nodes together"""
    drive_life_days: float | None = None
    days: float | None = None
    dollars: float | None = None
    kwh: float | None = None
    dollars_per_million_tokens: float | None = None
    kwh_per_million_tokens: float | None = None
    node_hours_per_million_tokens: float | None = None
    in_time: bool | None = None
    """whether the training ends within the time that was stated"""

    @classmethod
    def failed(cls, reason: str) -> StudyRow:
        """A row without a plan."""
        return cls(status="failed", reason=" ".join(reason.split()))

    @classmethod
    def of(cls, plan: Plan, within: float | None, found: int | None) -> StudyRow:
        """A plan's promises; `within` is the longest time of the training, in seconds."""
        predicted, training, group = plan.predicted, plan.training, plan.cluster.group
        bill = bill_of(plan)
        return cls(
            status="planned",
            found=found,
            model=plan.model.name,
            parameters=plan.model.parameter_count,
            cluster=plan.cluster.name,
            nodes=group.nodes,
            gpus=group.gpus,
            engine=plan.engine,
            runs=plan.executable[plan.engine] is True,
            strategy=strategy_text(plan.strategy),
            sequence_length=training.sequence_length,
            global_batch=training.global_batch,
            tokens_per_step=training.tokens_per_step,
            step_seconds=predicted.step_seconds,
            step_seconds_low=predicted.step_seconds_low,
            step_seconds_high=predicted.step_seconds_high,
            tokens_per_second=predicted.tokens_per_second,
            mfu=predicted.mfu,
            bottleneck=predicted.bottleneck,
            gpu_bytes=_most(plan, Tier.GPU),
            host_bytes=_most(plan, Tier.HOST),
            nvme_bytes=_most(plan, Tier.NVME),
            **_wear(plan),
            **_bill(bill),
            in_time=None if within is None else bill.meets(within),
        )


def _most(plan: Plan, tier: Tier) -> int:
    return max((use.used_bytes for use in plan.predicted.memory if use.tier is tier), default=0)


def _wear(plan: Plan) -> dict[str, Any]:
    wear = wear_of(plan)
    if wear is None:
        return {"drive_bytes_per_million_tokens": 0.0}
    seconds = MILLION / plan.predicted.tokens_per_second
    written = wear.bytes_per_day / DAY * seconds * plan.cluster.nodes
    return {"drive_bytes_per_million_tokens": written, "drive_life_days": wear.life_days}


def _bill(bill: Bill) -> dict[str, Any]:
    return {
        "days": bill.days,
        "dollars": bill.dollars,
        "kwh": bill.kwh,
        "dollars_per_million_tokens": bill.dollars_per_million_tokens,
        "kwh_per_million_tokens": bill.kwh_per_million_tokens,
        "node_hours_per_million_tokens": bill.node_hours_per_million_tokens,
    }
