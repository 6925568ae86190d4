"""A plan explained: its operators and moves, its efficiency, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bigplan.plan import Plan
from bigplan.planner import simulate_plan
from bigplan.report.advice import Advice, advice_of, hiding_tokens, in_one_unit
from bigplan.report.decision import decision
from bigplan.report.efficiency import Efficiency, efficiency_of
from bigplan.report.operators import OperatorRow, operator_rows
from bigplan.report.seconds import bound_text
from bigplan.report.stages import stages_of
from bigplan.report.today import engine_text


@dataclass(frozen=True)
class Explanation:
    """Everything that `bigplan explain` shows.

    `hidden_from`: the slowest transfer's resource and the tokens a step from which on compute takes
    longer, if all pass each layer together; None where nothing is moved or no number of tokens
    would do. `monitor` is the program in which people look for utilisation.
    """

    headline: str
    runs_today: str
    bound_by: str
    critical_path: Mapping[str, float]
    step_seconds: float
    tokens_per_step: int
    rows: tuple[OperatorRow, ...]
    efficiency: Efficiency
    monitor: str
    hidden_from: tuple[str, float] | None
    advice: tuple[Advice, ...]


def explain(plan: Plan) -> Explanation:
    """The plan's graph built, priced and played again, and read by operator."""
    rows, together = operator_rows(plan), in_one_unit(plan)
    hidden = hiding_tokens(plan, rows if together == plan else operator_rows(together))
    return Explanation(
        headline=decision(plan, stages_of(plan)),
        runs_today=engine_text(plan),
        bound_by=bound_text(plan.predicted),
        critical_path=plan.predicted.critical_path,
        step_seconds=plan.predicted.step_seconds,
        tokens_per_step=plan.training.tokens_per_step,
        rows=tuple(rows),
        efficiency=efficiency_of(plan, simulate_plan(plan), rows),
        monitor="nvidia-smi" if plan.cluster.group.gpu.device == "cuda" else "A process monitor",
        hidden_from=hidden,
        advice=tuple(advice_of(plan, rows, hidden)),
    )


def explain_json(explanation: Explanation) -> dict[str, Any]:
    """The explanation for programs: seconds, FLOPs, bytes; shares between 0 and 1."""
    data = asdict(explanation)
    found = explanation.hidden_from
    data["hidden_from"] = None if found is None else {"lane": found[0], "tokens": found[1]}
    data["operators"] = [
        {**asdict(row), "intensity": row.intensity, "bandwidth": row.bandwidth}
        for row in explanation.rows
    ]
    del data["rows"]
    return data
