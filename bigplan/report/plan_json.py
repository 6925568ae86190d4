"""A plan as one JSON object, for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bigplan.plan import Plan
from bigplan.report.stages import stages_of
from bigplan.timeline import Timeline

PREDICTED = (
    "step_seconds",
    "step_seconds_low",
    "step_seconds_high",
    "tokens_per_second",
    "mfu",
    "lower_bound_seconds",
    "model_gap",
    "simulated_gap",
)


def plan_json(plan: Plan, search_seconds: float) -> dict[str, Any]:
    """Sizes in bytes, times in seconds.

    `stages[].layers` and `recompute` count transformer blocks. `placement` maps parameters,
    gradients, optimizer and activations to the fraction of their bytes on each tier, over all of
    the stage's layers (embedding and head included). `memory[].scope` says whether the bytes are
    those of one GPU or of one node.
    """
    predicted = plan.predicted
    return {
        **{name: getattr(predicted, name) for name in PREDICTED},
        "search_seconds": search_seconds,
        "strategy": plan.strategy.model_dump(mode="json"),
        "stages": [asdict(stage) for stage in stages_of(plan)],
        "memory": [use.model_dump(mode="json", exclude={"by_purpose"}) for use in predicted.memory],
        "bottleneck": predicted.bottleneck,
        "executable": dict(plan.executable),
        "alternatives": [other.model_dump(mode="json") for other in plan.alternatives],
    }


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    """Step time and busy seconds, without the single events."""
    return {
        "step_seconds": timeline.seconds,
        "busy_seconds": timeline.busy(),
        "op_seconds": timeline.total_by(lambda event: event.op),
    }
