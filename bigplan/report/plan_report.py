"""A plan as a person reads it in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bigplan.cost.framework import NATIVE
from bigplan.graph.experts import UNEVEN
from bigplan.plan import Plan, Predicted
from bigplan.report.bill import bill_rows, wear_text
from bigplan.report.decision import decision, mixes_text
from bigplan.report.stages import stages_of
from bigplan.report.tables import (
    bound_text,
    busy_table,
    homes_table,
    kept_back,
    memory_table,
    parts_table,
    rivals_table,
)
from bigplan.report.text import seconds_text
from bigplan.report.today import engines_text, today_text
from bigplan.runnable import Runnable
from bigplan.spec.training import Training
from bigplan.units import counted
from bigplan.wear import wear_of


def plan_report(plan: Plan, search_seconds: float, runnable: Runnable) -> RenderableType:
    """The decision, whether it runs today, its predictions, where tensors live, its rivals."""
    stages = stages_of(plan)
    parts: list[RenderableType] = [
        Text(decision(plan, stages)),
        *([Text(mixes_text(plan))] if plan.search.mixes else []),
        Text(today_text(plan, runnable)),
        *([Text(engines)] if (engines := engines_text(plan, runnable)) else []),
        *plan_tables(plan),
    ]
    if plan.alternatives:
        parts.append(rivals_table(plan))
    parts.append(Text("\n".join(_closing(plan, search_seconds))))
    return Group(*parts)


def plan_tables(plan: Plan) -> list[RenderableType]:
    """What binds a step, its time and memory, and where tensors live."""
    predicted = plan.predicted
    return [
        Text(f"Bound by: {bound_text(predicted)}."),
        Text(""),
        promise_table(plan),
        Text(""),
        memory_table(predicted.memory),
        Text(kept_back(predicted.memory, plan.cluster.group.gpu), style="dim"),
        *([Text(uneven_text(), style="dim")] if spreads(plan) else []),
        *([Text(apart, style="dim")] if (apart := documents_text(plan.training)) else []),
        homes_table(stages_of(plan)),
        busy_table(predicted.busy_seconds, predicted.critical_path, predicted.step_seconds),
        parts_table(predicted.parts),
    ]


def spreads(plan: Plan) -> bool:
    """Whether numbers of rows that reach a rank's experts depend on the routing."""
    return plan.strategy.ep > 1 and plan.engine == "native"


def uneven_text() -> str:
    """What a plan's seconds and memory say of tokens that choose unevenly."""
    return (
        "Seconds count on an equal share of the tokens' choices for each GPU's experts; the GPU "
        f"with the most is waited for. Memory has room for {UNEVEN:.0%} more."
    )


def documents_text(training: Training) -> str:
    """What attention has to do where documents are kept apart; empty: they are not."""
    if not training.isolate_documents:
        return ""
    if training.preference is not None:
        return f"{_pairs_text(training)} {_lengths_text(training)}"
    return _lengths_text(training)


def _pairs_text(training: Training) -> str:
    wanted = training.preference
    assert wanted is not None
    model, first = "no second model", ""
    if wanted.refers:
        model = f"{model}: a launch first runs all of them forward, and keeps their"
        first = " log-probabilities"
    return (
        f"Learns from pairs of responses ({wanted.method}), with {model}{first}. The head's "
        "product runs once more in each step."
    )


def _lengths_text(training: Training) -> str:
    length, mean = training.sequence_length, training.attended_length
    if training.document_tokens is None:
        return (
            "Documents are kept apart. Their lengths are not known here, so attention is priced as "
            "if it saved nothing: name a prepared folder with --data, or say `document_tokens`."
        )
    return (
        f"Documents are kept apart. Within sequences of {length:,} tokens a token is in one of "
        f"{mean:,} on average, so attention computes {mean / length:.1%} of the scores."
    )


def step_report(predicted: Predicted) -> RenderableType:
    """The step time, and the resources with their busy seconds and seconds on the critical path."""
    return Group(
        Text(f"One step: {seconds_text(predicted.step_seconds)}"),
        Text(f"Bound by: {bound_text(predicted)}"),
        busy_table(predicted.busy_seconds, predicted.critical_path, predicted.step_seconds),
    )


def promise_table(plan: Plan) -> Table:
    """Step time with its error band, overlap, speed, and what the training costs."""
    predicted = plan.predicted
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    band = (
        f"{seconds_text(predicted.step_seconds_low)} to "
        f"{seconds_text(predicted.step_seconds_high)} in four of five runs"
    )
    overlap = (
        f"{seconds_text(predicted.step_seconds_overlapped)} if everything overlapped, "
        f"{seconds_text(predicted.step_seconds_serial)} if nothing did"
    )
    table.add_row("step time", f"{seconds_text(predicted.step_seconds)}  ({band})")
    table.add_row("overlap", overlap)
    table.add_row("tokens/s", f"{predicted.tokens_per_second:,.0f}")
    table.add_row("MFU", f"{predicted.mfu:.1%} of the GPUs' peak, counting nothing twice")
    for name, text in bill_rows(plan):
        table.add_row(name, text)
    return table


def gap_text(plan: Plan) -> str:
    """The model gap and the simulated gap in words."""
    predicted = plan.predicted
    bound = seconds_text(predicted.lower_bound_seconds)
    where = "In the model of this cluster"
    if plan.strategy.replicas:
        where = (
            "With micro-batches in these proportions, in the model of equal nodes in their place,"
        )
    return (
        f"{where} no plan takes less than {bound}; the model's best takes "
        f"{predicted.model_gap:.1%} longer (model gap), this plan, played action by action, "
        f"{predicted.simulated_gap:.1%} longer (simulated gap)."
    )


def _closing(plan: Plan, search_seconds: float) -> Iterator[str]:
    record = plan.search
    wear = wear_of(plan)
    if wear is not None:
        yield wear_text(wear)
    strategies = counted(record.strategies, "strategy", "strategies")
    if plan.engine != NATIVE.name:
        where = "is in the plan file" if plan.config else f"comes from `config --for {plan.engine}`"
        yield (
            f"Priced {counted(record.strategies, 'way', 'ways')} in which {plan.engine} can run it "
            f"in {seconds_text(search_seconds)}; its configuration {where}."
        )
        return
    yield gap_text(plan)
    if record.stopped:
        yield "The search was stopped before its end: the gaps above say what may be missed."
    yield (
        f"Searched {strategies} ({record.relaxations} relaxed, "
        f"{record.programs} solved with {record.solver}) in {seconds_text(search_seconds)}."
    )
