"""Whether a plan can be run today, and which plan can be run where it cannot."""

from __future__ import annotations

from typing import Any

from bigplan.engines import Chosen, engine_of
from bigplan.graph.told import strategy_text
from bigplan.plan import Plan
from bigplan.report.text import seconds_text
from bigplan.runnable import Runnable

YES = "yes, with `bigplan launch`"


def today_text(plan: Plan, runnable: Runnable) -> str:
    """'Runs today: ...'. Where the plan cannot run: the best plan that can, and how much slower."""
    if not runnable.refusal:
        return f"Runs today: {_yes(plan)}."
    no = f"Runs today: no, {runnable.refusal}."
    if runnable.plan is None:
        if not runnable.because:
            return no
        return f"{no} Nothing that runs today was found: {runnable.because.rstrip('.')}."
    other = runnable.plan
    seconds = other.predicted.step_seconds
    slower = seconds / plan.predicted.step_seconds - 1
    found = "found before the search was stopped" if other.search.stopped else "that runs today"
    return (
        f"{no} The best {found}: {strategy_text(other.strategy)}, {seconds_text(seconds)} a step "
        f"({slower:+.0%}); add --engine native."
    )


def engines_text(plan: Plan, runnable: Runnable) -> str:
    """'By engine: ...', and the planner's best plan where no engine can run it yet."""
    chosen = runnable.chosen
    if chosen is None:
        return ""
    told = [_by_engine(plan, name, found) for name, found in chosen.by_engine.items()]
    text = f"By engine: {'; '.join(told)}." if len(told) > 1 else ""
    if chosen.best.executable[chosen.best.engine] is not True and chosen.best != plan:
        seconds = chosen.best.predicted.step_seconds
        text += (
            f" The planner's best, which nothing runs yet: {strategy_text(chosen.best.strategy)}, "
            f"{seconds_text(seconds)} a step ({seconds / plan.predicted.step_seconds - 1:+.0%}), "
            f"for {chosen.best.executable[chosen.best.engine]}."
        )
    return text.strip()


def _by_engine(plan: Plan, name: str, found: Plan | str) -> str:
    if isinstance(found, str):
        return f"{name} has none ({found.partition('. ')[0].rstrip('.')})"
    seconds = found.predicted.step_seconds
    text = f"{name} {seconds_text(seconds)} a step"
    if found == plan:
        return f"{text}, taken"
    return f"{text} ({seconds / plan.predicted.step_seconds - 1:+.0%})"


def engine_text(plan: Plan) -> str:
    """'Runs today: ...' for a plan whose request is not known."""
    runs = plan.executable[plan.engine]
    return f"Runs today: {_yes(plan) if runs is True else f'no, {runs}'}."


def _yes(plan: Plan) -> str:
    """That the plan runs, and what this machine lacks to launch it, if anything."""
    missing = engine_of(plan).missing()
    return YES if missing is None else f"{YES}, but not from here: {missing}"


def today_json(plan: Plan, runnable: Runnable) -> dict[str, Any]:
    """What can be run today, for programs.

    `best`: whether the plan itself can be run. `strategy` and `step_seconds` are those of the best
    plan that can be run.
    """
    other = runnable.plan
    return {
        "best": not runnable.refusal,
        "refusal": runnable.refusal or None,
        "strategy": None if other is None else other.strategy.model_dump(mode="json"),
        "step_seconds": None if other is None else other.predicted.step_seconds,
        "slower_by": (
            None
            if other is None
            else other.predicted.step_seconds / plan.predicted.step_seconds - 1
        ),
        "because": runnable.because or None,
        "engines": None if runnable.chosen is None else _engines_json(runnable.chosen),
    }


def _engines_json(chosen: Chosen) -> dict[str, Any]:
    """For each installed engine, the step seconds of its best plan, or why it has none."""
    return {
        name: {"step_seconds": None, "because": found}
        if isinstance(found, str)
        else {"step_seconds": found.predicted.step_seconds, "because": None}
        for name, found in chosen.by_engine.items()
    }
