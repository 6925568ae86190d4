"""An appraisal as text for a terminal, and as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bigplan.engines.shortage import short_text
from bigplan.graph.told import strategy_text
from bigplan.intake.appraisal import Appraisal, Better
from bigplan.plan import Plan
from bigplan.report.decision import decision
from bigplan.report.plan_json import PREDICTED, step_json
from bigplan.report.plan_report import plan_tables
from bigplan.report.stages import stages_of
from bigplan.report.text import seconds_text

NO_GAIN = 0.005  # of the step: plans that differ by less are equally fast
NEEDED = "it fits, what the file says does not"


def appraisal_report(found: Appraisal) -> RenderableType:
    """What runs, what is not priced, whether it fits, and where time and memory go."""
    setup, plan = found.setup, found.plan
    told = [
        decision(plan, stages_of(plan)),
        _fit(found),
        *_listed("Not in the price, or not as it is", setup.unpriced),
        *_listed("Taken for given", setup.assumed),
    ]
    if setup.ignored:
        told.append(f"Not looked at, for time and memory: {', '.join(setup.ignored)}.")
    return Group(*map(Text, told), *plan_tables(plan))


def _fit(found: Appraisal) -> str:
    if not found.short:
        return "It fits."
    return f"It does not fit: {short_text(found.short)} short. What it would take if it did:"


def _listed(title: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        yield f"{title}:"
        yield from (f"  - {text}" for text in texts)


def better_report(found: Appraisal, better: Better) -> RenderableType:
    """The gain of the best plans."""
    name = found.setup.engine
    lines = [f"The best plan of {name}: {_gain(found, better.same)}"]
    if isinstance(better.fastest, str) or better.fastest != better.same:
        lines.append(f"The fastest that can run here: {_gain(found, better.fastest)}")
    return Text("\n".join(lines))


def _gain(found: Appraisal, plan: Plan | str) -> str:
    if isinstance(plan, str):
        return f"none, {plan.rstrip('.')}."
    seconds, now = plan.predicted.step_seconds, found.plan.predicted.step_seconds
    whose = "" if plan.engine == found.plan.engine else f" by {plan.engine}"
    text = f"{strategy_text(plan.strategy)}{whose}, {seconds_text(seconds)} a step"
    if found.short:
        return f"{text}; {NEEDED}."
    if abs(now / seconds - 1) < NO_GAIN:
        return f"{text}, as fast as this."
    factor = f"{now / seconds:.2f} times as fast" if now > seconds else f"{now / seconds - 1:+.0%}"
    return f"{text}, {factor}; {decision(plan, stages_of(plan)).partition('; ')[2]}"


def appraisal_json(found: Appraisal, better: Better | None) -> dict[str, Any]:
    """Sizes in bytes, times in seconds; `better.*.step_seconds` is null where there is no plan."""
    plan, setup = found.plan, found.setup
    predicted = plan.predicted
    return {
        "decision": decision(plan, stages_of(plan)),
        "engine": plan.engine,
        "fits": not found.short,
        "short_bytes": {str(tier): nbytes for tier, nbytes in found.short.items()},
        "not_priced": list(setup.unpriced),
        "assumed": list(setup.assumed),
        "not_looked_at": list(setup.ignored),
        **{name: getattr(predicted, name) for name in PREDICTED},
        **step_json(predicted),
        "step_parts": predicted.parts.model_dump(mode="json"),
        "memory": [use.model_dump(mode="json") for use in predicted.memory],
        "strategy": plan.strategy.model_dump(mode="json"),
        "training": found.request.training.model_dump(mode="json"),
        "better": None
        if better is None
        else {"same_engine": _plan_json(better.same), "fastest": _plan_json(better.fastest)},
    }


def _plan_json(plan: Plan | str) -> dict[str, Any]:
    if isinstance(plan, str):
        return {"engine": None, "strategy": None, "step_seconds": None, "because": plan}
    return {
        "engine": plan.engine,
        "strategy": plan.strategy.model_dump(mode="json"),
        "step_seconds": plan.predicted.step_seconds,
        "because": None,
    }
