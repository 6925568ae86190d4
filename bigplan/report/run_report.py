"""A run's predictions beside its measurements, from the run's record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bigplan.graph.told import strategy_text
from bigplan.launcher.lock import in_use
from bigplan.launcher.record import Metric, Record
from bigplan.plan import mfu_of
from bigplan.program import Lane, Op
from bigplan.report.efficiency import resource_seconds
from bigplan.report.text import TIER_NAMES, seconds_text, table
from bigplan.spec.sharing import WHOSE
from bigplan.timeline import Timeline
from bigplan.units import counted, format_bytes, format_count, listed


def run_report(record: Record) -> RenderableType:
    """Loss and speed of the run, then tables of resources, actions and memory, then notes."""
    parts: list[RenderableType] = [Text("\n".join(headline_lines(record))), *comparisons(record)]
    if record.measured and any(e.lane == Lane.STATE_IN for e in record.measured.events):
        parts.append(Text(_BESIDE))
    parts.append(memory_comparison(record))
    parts += [Text(f"Note: {note}") for note in record.summary.notes]
    return Group(*parts)


def run_json(record: Record) -> dict[str, object]:
    """The report for programs: seconds of one steady step and bytes, predicted and measured.

    `resources` and `actions` are empty where no step was measured. `state` tells a killed run from
    a running one: the `summary` of both says `running`.
    """
    found: dict[str, dict[str, object]] = {"resources": {}, "actions": {}}
    if record.measured is not None:
        predicted, measured = record.predicted, at_work(record.measured)
        sums = {
            "resources": (resource_seconds(predicted), resource_seconds(measured)),
            "actions": (
                predicted.total_by(lambda event: str(event.op)),
                measured.total_by(lambda event: str(event.op)),
            ),
        }
        for what, (before, after) in sums.items():
            for name in sorted({*before, *after}):
                found[what][name] = {"predicted": before.get(name), "measured": after.get(name)}
    last = record.metrics[-1].model_dump(mode="json") if record.metrics else None
    summary = record.summary.model_dump(mode="json")
    told = {"run": str(record.folder), "state": _state(record), "summary": summary}
    return told | {"last_step": last, **found}


def comparisons(record: Record) -> Iterator[Table]:
    """Tables of a steady step, by resource and by kind of action, if a step was measured."""
    if record.measured is None:
        return
    predicted, measured = record.predicted, at_work(record.measured)
    yield comparison(
        "One steady step by resource (busy seconds)",
        resource_seconds(predicted),
        resource_seconds(measured),
    )
    yield comparison(
        "One steady step by kind of action (seconds)",
        predicted.total_by(lambda event: event.op),
        measured.total_by(lambda event: event.op),
    )


def at_work(timeline: Timeline) -> Timeline:
    """The timeline without FREE and RECV, which only wait and which no simulation shows."""
    idle = (Op.FREE, Op.RECV)
    return replace(timeline, events=tuple(e for e in timeline.events if e.op not in idle))


def headline_lines(record: Record) -> Iterator[str]:
    """What ran, how many steps it did, its loss and speed, and events such as restarts."""
    summary, metrics = record.summary, record.metrics
    versions = ", ".join(f"{name} {number}" for name, number in summary.versions.items())
    state = "" if summary.status == "finished" else f", {_state(record)}"
    ranks = counted(summary.ranks, "rank")
    yield f"{record.folder.name}: {record.plan.model.name}, {ranks}, {versions}"
    if not metrics:
        yield f"No step ended{state}."
        return
    took = seconds_text(_seconds_of(record))
    yield f"{_steps(record)} in {took}{state}; {_losses(metrics)}"
    predicted, measured = summary.predicted_step_seconds, summary.measured_step_seconds
    if measured is not None:
        plan = record.plan
        tokens = plan.training.tokens_per_step / measured
        # Both from the seconds on record: the prediction in the plan may have been edited since.
        before, reached = (100 * mfu_of(plan, seconds) for seconds in (predicted, measured))
        yield (
            f"median step {seconds_text(measured)} measured, {seconds_text(predicted)} predicted "
            f"(x{measured / predicted:.2f}); {format_count(float(f'{tokens:.3g}'))} tokens/s; "
            f"MFU {reached:.3g}%, {before:.3g}% predicted"
        )
    yield from _training_lines(record)


# An update on the GPU waits behind the forward's kernels. Its measured time is up to 30 times that
# of its own work.
_BESIDE = (
    'Note: "gpu update" runs beside the forward; measured on a GPU, it and "update" include '
    "waiting for the forward's kernels."
)

# Of a run whose record is not closed, by whether a launch has its folder.
_NOT_CLOSED = {True: "running", False: "killed", None: "running, or killed"}


def _state(record: Record) -> str:
    """How a run stands."""
    status = record.summary.status
    return _NOT_CLOSED[in_use(record.folder)] if status == "running" else status


def _steps(record: Record) -> str:
    """'20 steps', or '3 of 20 steps' where the run did not do all of them."""
    done, target = len(record.metrics), record.summary.target_steps
    return counted(done, "step") if target in (None, done) else f"{done} of {target} steps"


def _seconds_of(record: Record) -> float:
    """Seconds of the run's steps. While it runs, its summary is older than its last ones."""
    return sum(metric.seconds for metric in record.metrics)


def _losses(metrics: Sequence[Metric]) -> str:
    """'loss 5.1 to 3.2', of the first and the last step that has one."""
    told = [metric.loss_text for metric in metrics if not metric.uncounted]
    return f"loss {told[0]} to {told[-1]}" if told else f"loss {metrics[0].loss_text}"


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _training_lines(record: Record) -> Iterator[str]:
    """Lines on validation, data, overflows, checkpoints, restarts and plans, if there are any."""
    metrics, summary = record.metrics, record.summary
    validated = [metric for metric in metrics if metric.validation_loss is not None]
    if validated:
        first, last = validated[0], validated[-1]
        told = f"validation loss {_loss(last.validation_loss)} after step {last.step}"
        before = f" ({_loss(first.validation_loss)} after step {first.step})"
        yield told + (before if first is not last else "")
    waited = [metric for metric in metrics[1:] if metric.data_seconds is not None]
    if waited:
        seconds = sum(metric.data_seconds or 0.0 for metric in waited)
        share = seconds / sum(metric.seconds for metric in waited)
        yield (
            f"waiting for data: {seconds_text(seconds / len(waited))} a step, "
            f"{100 * share:.3g}% of the time"
        )
    skipped = sum(metric.skipped for metric in metrics)
    if skipped:
        were = "was" if skipped == 1 else "were"
        steps = counted(len(metrics), "step")
        yield f"{skipped} of {steps} {were} skipped: a gradient overflowed"
    if summary.checkpoint is not None:
        after = [str(step) for step in summary.resumed]
        resumed = f"; resumed after step {listed(after)}" if after else ""
        yield f"newest checkpoint: step {summary.checkpoint}{resumed}"
    for lost in summary.restarts:
        again = counted(lost.done - lost.back_to, "step")
        yield (
            f"after step {lost.done} {lost.reason}. It started again by itself after step "
            f"{lost.back_to}: {again} and {seconds_text(lost.seconds)} lost"
        )
    if len(summary.plans) > 1:
        for run in summary.plans:
            why = f", as {run.reason}" if run.reason else ""
            step = seconds_text(run.predicted_step_seconds)
            yield (
                f"from step {run.after + 1} ({run.when}) planned for {counted(run.nodes, 'node')}: "
                f"{strategy_text(run.strategy)}; {step} a step predicted{why}"
            )
    if summary.restarts and summary.effective is not None:
        yield f"effective training time: {100 * summary.effective:.3g}% of the last launch's"


def comparison(title: str, predicted: Mapping[str, float], measured: Mapping[str, float]) -> Table:
    """Predicted seconds, measured seconds and their ratio; rows with most seconds first."""
    figures = ("predicted", "measured", "ratio")
    rows = table(title, "", *figures, right=figures)
    names = sorted(
        {*predicted, *measured}, key=lambda n: -max(predicted.get(n, 0.0), measured.get(n, 0.0))
    )
    for name in names:
        before, after = predicted.get(name), measured.get(name)
        if before or after:
            rows.add_row(name, _seconds(before), _seconds(after), _ratio(after, before))
    return rows


def memory_comparison(record: Record) -> Table:
    """The most bytes of each tier, predicted and measured."""
    figures = ("promised", "measured", "ratio", "capacity")
    rows = table("Memory at most", "tier", *figures, right=figures)
    several = any(use.stage for use in record.summary.memory)
    for use in record.summary.memory:
        if use.predicted or use.measured:
            where = f"{TIER_NAMES[use.tier]} per {WHOSE[use.scope]}"
            rows.add_row(
                f"{where}, stage {use.stage}" if several else where,
                format_bytes(use.predicted),
                "-" if use.measured is None else format_bytes(use.measured),
                _ratio(use.measured, use.predicted),
                format_bytes(use.capacity),
            )
    return rows


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds_text(value)


def _ratio(after: float | None, before: float | None) -> str:
    return f"{after / before:.2f}" if after is not None and before else "-"
