"""A plan as one JSON object, for programs: everything that the terminal shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bigplan.bill import bill_of
from bigplan.largest import Largest
from bigplan.plan import Plan, Predicted
from bigplan.report.decision import decision
from bigplan.report.stages import stages_of
from bigplan.report.tables import why_slower
from bigplan.report.today import today_json
from bigplan.runnable import Runnable
from bigplan.spec.lora import trained_count
from bigplan.wear import wear_of
from bigplan.whatif import Answer

PREDICTED = (
    "step_seconds",
    "step_seconds_low",
    "step_seconds_high",
    "step_seconds_overlapped",
    "step_seconds_serial",
    "tokens_per_second",
    "mfu",
    "lower_bound_seconds",
    "model_gap",
    "simulated_gap",
)


def plan_json(
    plan: Plan,
    search_seconds: float,
    runnable: Runnable,
    answer: Answer | None = None,
    largest: Sequence[Largest] | None = None,
) -> dict[str, Any]:
    """The facts of plan_facts(), with the search time, what runs today and what would help.

    `runs_today.strategy` is the best strategy that can be run, null where none can be. `what_if`
    and `largest` are null where the user did not ask for them.
    """
    return {
        **plan_facts(plan),
        "search_seconds": search_seconds,
        "runs_today": today_json(plan, runnable),
        "what_if": None if answer is None else _what_if(answer),
        "largest": None if largest is None else [asdict(found) for found in largest],
    }


def plan_facts(plan: Plan) -> dict[str, Any]:
    """What a plan says by itself: sizes in bytes, times in seconds.

    `trained_parameters` are all `parameters`, or those of adapters.
    `groups_tried` are the choices of a mixed cluster's groups, null where its nodes are alike.
    `stages[].layers` and `recompute` count transformer blocks. `placement` maps a kind of tensor to
    the fraction of its bytes on each tier. `homes` maps a kind of tensor to layers and bytes, and
    to those of them that are streamed through the GPU. `placement` and `homes` count all layers
    of the stage, embedding and head among them. `memory[].scope` says whether the bytes are those
    of one GPU or of one node. In `busy_seconds` and `moved_bytes`, lanes that share a link are one
    resource. `critical_path` (seconds by resource, most first) adds up to the step, and so does
    `step_parts`. `config` is the engine's whole configuration, where the engine has one. In `bill`,
    values without a stated price, power or number of tokens are null. `drives` is null where next
    to nothing is written to NVMe. `drives.job_share` counts the training's tokens. Where the number
    of tokens is not stated, it counts the steps of `drives.steps`.
    """
    predicted, stages, wear = plan.predicted, stages_of(plan), wear_of(plan)
    return {
        "decision": decision(plan, stages),
        "parameters": plan.model.parameter_count,
        "trained_parameters": trained_count(plan.model, plan.training.lora),
        "groups_tried": [mix.model_dump(mode="json") for mix in plan.search.mixes] or None,
        **{name: getattr(predicted, name) for name in PREDICTED},
        "search": plan.search.model_dump(mode="json"),
        "strategy": plan.strategy.model_dump(mode="json"),
        "stages": [asdict(stage) for stage in stages],
        "memory": [use.model_dump(mode="json") for use in predicted.memory],
        "bottleneck": predicted.bottleneck,
        "critical_path": dict(predicted.critical_path),
        "busy_seconds": dict(predicted.busy_seconds),
        "step_parts": predicted.parts.model_dump(mode="json"),
        "moved_bytes": dict(predicted.moved_bytes),
        "drives": None if wear is None else asdict(wear),
        "bill": asdict(bill_of(plan)),
        "engine": plan.engine,
        "config": dict(plan.config),
        "executable": dict(plan.executable),
        "alternatives": [
            {**other.model_dump(mode="json"), "because": why_slower(plan, other)}
            for other in plan.alternatives
        ],
    }


def _what_if(answer: Answer) -> dict[str, Any]:
    outcomes = [{**asdict(outcome), "factor": outcome.factor} for outcome in answer.outcomes]
    batch = None
    if answer.batch is not None:
        batch = asdict(answer.batch) | {"strategy": answer.batch.strategy.model_dump(mode="json")}
    return {"solved": outcomes, "unasked": list(answer.unasked), "larger_batch": batch}


def step_json(predicted: Predicted) -> dict[str, Any]:
    """The step time and where it goes, without single events."""
    return {
        "step_seconds": predicted.step_seconds,
        "bottleneck": predicted.bottleneck,
        "critical_path": dict(predicted.critical_path),
        "busy_seconds": dict(predicted.busy_seconds),
        "op_seconds": dict(predicted.op_seconds),
    }
