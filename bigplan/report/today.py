"""Whether a plan can be run today, and what can where it cannot."""

from __future__ import annotations

from typing import Any

from bigplan.engines import engine_of
from bigplan.plan import Plan
from bigplan.report.decision import strategy_text
from bigplan.report.text import seconds_text
from bigplan.runnable import Runnable

YES = "yes, with `bigplan launch`"


def today_text(plan: Plan, runnable: Runnable) -> str:
    """'Runs today: ...', with the best plan that does and how much slower it is."""
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


def engine_text(plan: Plan) -> str:
    """The same of a plan alone, whose request is not known."""
    runs = plan.executable[plan.engine]
    return f"Runs today: {_yes(plan) if runs is True else f'no, {runs}'}."


def _yes(plan: Plan) -> str:
    """That it does, and what this machine lacks to launch it."""
    missing = engine_of(plan).missing()
    return YES if missing is None else f"{YES}, but not from here: {missing}"


def today_json(plan: Plan, runnable: Runnable) -> dict[str, Any]:
    """`best`: whether the plan itself can be run; `strategy` and seconds are of what can."""
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
    }
