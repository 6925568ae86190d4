"""A plan explained: its operators and moves, its efficiency, and how to improve it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bigplan.plan import Plan
from bigplan.planner import seen, simulate_plan
from bigplan.report.advice import Advice, advice_of, hiding_tokens, in_one_unit
from bigplan.report.decision import decision
from bigplan.report.efficiency import Efficiency, efficiency_of
from bigplan.report.operators import LAUNCHES, OperatorRow, operator_rows
from bigplan.report.stages import stages_of
from bigplan.report.tables import bound_text
from bigplan.report.text import bytes_text, seconds_text, table
from bigplan.report.today import engine_text
from bigplan.units import format_bandwidth, format_count, format_flops, listed, rounded


@dataclass(frozen=True)
class OperatorExplanation:
    """Everything that `bigplan explain` shows.

    `hidden_from` is the resource whose updates or moves take longest, and the tokens a step from
    which compute takes longer than it. This assumes that all tokens pass each layer together. It is
    None where nothing moves, no number of tokens suffices, or stages take turns. `monitor` is the
    program that shows utilisation.
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


def explain(plan: Plan) -> OperatorExplanation:
    """Explain a plan. Its graph is built, priced and simulated again."""
    view = seen(plan)
    rows, together = operator_rows(view), in_one_unit(view)
    hidden = hiding_tokens(view, rows if together == view else operator_rows(together))
    if hidden is not None and view != plan:  # the group's tokens as those of all groups
        whole = plan.training.tokens_per_step / view.training.tokens_per_step
        hidden = hidden[0], hidden[1] * whole
    return OperatorExplanation(
        headline=decision(plan, stages_of(plan)) + _whose(plan),
        runs_today=engine_text(plan),
        bound_by=bound_text(plan.predicted),
        critical_path=plan.predicted.critical_path,
        step_seconds=plan.predicted.step_seconds,
        tokens_per_step=plan.training.tokens_per_step,
        rows=tuple(rows),
        efficiency=efficiency_of(view, simulate_plan(plan), rows),
        monitor="nvidia-smi" if plan.cluster.group.gpu.device == "cuda" else "A process monitor",
        hidden_from=hidden,
        advice=tuple(advice_of(plan, rows, hidden)),
    )


def _whose(plan: Plan) -> str:
    """Whose figures are told, where groups of nodes have work of their own."""
    if not plan.strategy.replicas:
        return ""
    return (
        f" Operators and moves are those of {seen(plan).cluster.group.name}, which paces the step."
    )


def explain_json(explanation: OperatorExplanation) -> dict[str, Any]:
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


HARDLY = 1e-4  # of all rows' seconds: shorter waiting for launches gets no row
SHORT = {"communication": "network"}
VISIBLE = 0.005  # a smaller share of the time is not told
LEGEND = (
    "of peak: of the FLOP/s where compute or power binds, of memory bandwidth elsewhere. power: "
    "the GPU's limit, at which its clock falls. TC: tensor cores; "
    "slow: on them, with narrow loads, for rows' lengths are no multiples of 8. "
    "tile, wave: lost to partial tiles of 128 x 256 and to the last wave of them; lost: of the "
    "time, with the best tile. hidden: at the same time as a product."
)


def explain_report(explanation: OperatorExplanation, width: int = 200) -> RenderableType:
    """Operators, moves, efficiency, advice, for a terminal of `width` columns."""
    rows = explanation.rows
    return Group(
        Text(explanation.headline),
        Text(explanation.runs_today),
        Text(f"Bound by: {explanation.bound_by}."),
        Text(""),
        operators_table([row for row in rows if row.of_layers], width),
        Text(LEGEND, style="dim"),
        moves_table([row for row in rows if not row.of_layers]),
        Text("\n".join(efficiency_lines(explanation.efficiency, explanation.monitor))),
        Text(""),
        Text("\n".join(advice_lines(explanation))),
    )


def operators_table(rows: Sequence[OperatorRow], width: int = 200) -> Table:
    """A row per pass, then a row per operator, and one for launches unless they hardly matter."""
    columns = {n: cell for n, cell in COLUMNS.items() if width >= WIDE or n not in WIDE_ONLY}
    title = "Operators of a step (one GPU of every pipeline stage)"
    made = table(
        title, *columns, right=[n for n in columns if n not in ("operator", "bound", "TC")]
    )
    whole = sum(row.seconds for row in rows)
    for (where, phase), run in groupby(rows, key=lambda row: (row.where, row.phase)):
        members = list(run)
        total = seconds_text(sum(row.seconds for row in members))
        made.add_row(f"[bold]{where}, {phase}[/bold]", f"[bold]{total}[/bold]")
        for row in members:
            if row.name != LAUNCHES or row.seconds > HARDLY * whole:
                made.add_row(*(cell(row) for cell in columns.values()))
    return made


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _cores(row: OperatorRow) -> str:
    if row.tensor_cores and (row.alignment or 1.0) < 1.0:
        return "slow"
    return {True: "yes", False: "no", None: "-"}[row.tensor_cores]


COLUMNS: dict[str, Callable[[OperatorRow], str]] = {
    "operator": lambda row: f" {row.name}",
    "time": lambda row: seconds_text(row.seconds) if row.seconds else "hidden",
    "bound": lambda row: SHORT.get(row.bound, row.bound),
    "FLOP": lambda row: (
        format_flops(rounded(row.flops)).removesuffix("FLOP/s") if row.flops else "-"
    ),
    "bytes": lambda row: bytes_text(row.nbytes) if row.nbytes else "-",
    "FLOP/B": lambda row: "-" if row.intensity is None else f"{rounded(row.intensity):g}",
    "of peak": lambda row: _share(row.of_peak),
    "TC": _cores,
    "tile": lambda row: _share(row.tile_lost),
    "wave": lambda row: _share(row.wave_lost),
    "lost": lambda row: _share(row.lost),
}
WIDE = 105  # columns of a terminal in which all columns of the table fit
WIDE_ONLY = ("of peak", "tile", "wave")


def moves_table(rows: Sequence[OperatorRow]) -> Table:
    """A row per kind of update or move. Within a resource, the longest comes first."""
    made = table(
        "Updates and moves of a step",
        *("resource", "action", "for every", "times", "seconds", "bytes", "rate", "bound by"),
        right=("times", "seconds", "bytes", "rate"),
        whole=("action",),
    )
    for row in sorted(rows, key=lambda row: (row.where, -row.seconds)):
        if row.seconds > 0:
            made.add_row(
                row.where,
                row.name,
                row.phase,
                f"{row.times:,}",
                seconds_text(row.seconds),
                bytes_text(row.nbytes) if row.nbytes else "-",
                "-" if row.bandwidth is None else format_bandwidth(rounded(row.bandwidth)),
                row.bound,
            )
    return made


def efficiency_lines(found: Efficiency, monitor: str) -> Iterator[str]:
    """Lines on how well the GPU is used, compared with what a monitor would show."""
    yield (
        f"{monitor} would show a utilisation of {found.utilisation:.0%}: some kernel runs for so "
        "much of the step. It does not say how well:"
    )
    yield f"  {found.mfu:.1%} of peak is the model's own arithmetic (MFU)"
    yield f"  {found.hfu:.1%} of peak with what is computed twice"
    yield (
        f"  {format_bandwidth(rounded(found.memory_bandwidth))} of device memory on average while "
        f"kernels run, {found.memory_share:.0%} of nominal"
    )
    if found.narrow_loads:
        yield (
            f"  {found.narrow_loads:.1%} of the products' time is on tensor cores that wait for "
            "narrow loads: rows' lengths are no multiples of 8"
        )
    if found.without_tensor_cores:
        yield f"  {found.without_tensor_cores:.1%} of the products' time is without tensor cores"
    if found.power_lost >= VISIBLE:
        yield (
            f"  {found.power_lost:.1%} of the products' time is lost to the GPU's power limit, at "
            "which its clock falls"
        )
    if found.by_bound:
        told = found.by_bound.items()
        shares = [f"{name} {share:.0%}" for name, share in told if share >= VISIBLE]
        yield f"  time of forward and backward is bound by {listed(shares)}"


def _tokens(tokens: float) -> str:
    return format_count(float(f"{tokens:.2g}"))


def advice_lines(explanation: OperatorExplanation) -> Iterator[str]:
    """The number of tokens from which compute hides all transfers, then advice by its gain."""
    if explanation.hidden_from is not None:
        lane, tokens = explanation.hidden_from
        yield (
            f"Compute can take longer than every update and move from {_tokens(tokens)} tokens a "
            f"step on, if all pass a layer together ({lane} takes longest); the plan has "
            f"{_tokens(explanation.tokens_per_step)}."
        )
    if not explanation.advice:
        yield "No advice: dimensions, precision, batch and drives suit this machine."
        return
    yield "Advice, by what is at stake:"
    for advice in explanation.advice:
        yield f"- {advice.text}"
