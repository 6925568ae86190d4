"""What AdamW's moments in bf16 or 8 bits would save a plan that its optimizer state holds up."""

from __future__ import annotations

from collections.abc import Iterator

from bigplan.errors import InputError
from bigplan.graph.build import element_sizes
from bigplan.placement import Tier
from bigplan.plan import Plan
from bigplan.program import Lane
from bigplan.recheck import promised_again
from bigplan.report.text import seconds_text
from bigplan.spec.moments import Moments

# What state takes that does not stay on the GPU.
OF_STATE = (
    *(Lane.H2D, Lane.D2H, Lane.STATE_IN, Lane.STATE_OUT),
    *(Lane.CPU, Lane.NVME_READ, Lane.NVME_WRITE),
)
FEWER: tuple[Moments, ...] = ("bf16", "int8")


def with_moments(plan: Plan, moments: Moments) -> Plan:
    """The plan as it is, with moments stored so. Raises InputError where its memory is short."""
    optimizer = plan.training.optimizer.model_copy(update={"moments": moments})
    training = plan.training.model_copy(update={"optimizer": optimizer})
    return promised_again(plan.model_copy(update={"training": training}))


def state_is_away(plan: Plan) -> bool:
    """Whether a native plan with equal work has AdamW's state in fp32 off the GPU."""
    optimizer = plan.training.optimizer
    away = any(
        kind.optimizer.get(tier, 0.0) > 0
        for stage in plan.placement.stages
        for kind in stage.kinds.values()
        for tier in (Tier.HOST, Tier.NVME)
    )
    ours = plan.engine == "native" and not plan.strategy.replicas
    return away and ours and (optimizer.name, optimizer.moments) == ("adamw", "fp32")


def held_up(plan: Plan) -> float:
    """Seconds of the step's critical path that pass with moves and updates off the GPU."""
    return sum(plan.predicted.critical_path.get(lane, 0.0) for lane in OF_STATE)


def moments_advice(plan: Plan, least: float) -> Iterator[tuple[float, str]]:
    """Share of the step saved, above `least`, and the words; the plan is played again for both."""
    step = plan.predicted.step_seconds
    if not state_is_away(plan) or held_up(plan) <= least * step:
        return
    try:
        seconds = {m: with_moments(plan, m).predicted.step_seconds for m in FEWER}
    except InputError:  # of a plan that its own cluster has no room for
        return
    best = min(FEWER, key=lambda moments: seconds[moments])
    gain = 1 - seconds[best] / step
    if gain > least:
        faster = [moments for moments in FEWER if seconds[moments] < step]
        saved = " and ".join(f"{m} {seconds_text(step - seconds[m])}" for m in faster)
        each = {m: _bytes(plan, m) for m in ("fp32", *FEWER)}
        bytes_each = f"{each['bf16']:.3g} or {each['int8']:.3g} bytes a parameter"
        yield (
            gain,
            f"Optimizer state holds the step up. AdamW's moments in fewer bits (`--moments {best}`)"
            f" save of a step, with all else as it is: {saved} ({gain:.0%}). State takes "
            f"{bytes_each} and not {each['fp32']:.3g}, so that a new plan may keep more of it near "
            "the GPU. Compare losses with some steps in fp32 first.",
        )


def _bytes(plan: Plan, moments: Moments) -> float:
    optimizer = plan.training.optimizer.model_copy(update={"moments": moments})
    return element_sizes(plan.training.model_copy(update={"optimizer": optimizer})).stored
