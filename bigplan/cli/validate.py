"""`bigplan validate`: the cost model against measured training runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigplan.cli.as_json import AsJson, print_json
from bigplan.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from bigplan.validate.quality import Quality, Regret
    from bigplan.validate.score import Scored

_SHOWN = (
    "id",
    "status",
    "reason",
    "predicted_step_s",
    "measured_step_s",
    "error_pct",
    "predicted_peak_gb",
    "measured_peak_gb",
    "memory_kind",
    "sweep",
)
_RUNS = 50  # of an own file, shown one by one
_REASONS = 5  # reported where no row can be used; and runs, by name, that are skipped for one


def validate(
    rows: Annotated[
        Path | None,
        typer.Option("--rows", help="CSV of measured runs (default: the published ones shipped)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict measured training runs with their own configurations, and show the errors.

    Exit codes: 0, 2 bad input, also where no row can be used.
    """
    from bigplan.validate.quality import group_quality, memory_quality, pick_regret
    from bigplan.validate.rows import read_rows
    from bigplan.validate.score import score

    scored = score(read_rows(rows))
    _require_some(scored, rows)
    groups, memory, picks = group_quality(scored), memory_quality(scored), pick_regret(scored)
    if as_json:
        tables = {"groups": _plain(groups), "memory": _plain(memory), "picks": _plain(picks)}
        print_json({"rows": [_row(one) for one in scored], **tables})
    else:
        if rows is not None and len(scored) <= _RUNS:
            _print_runs(scored)
        _print(scored, groups, memory, picks)


def _require_some(scored: list[Scored], path: Path | None) -> None:
    """Raise InputError, with the most frequent reasons, where no row is scored."""
    if any(one.status == "scored" for one in scored):
        return
    if not scored:
        raise InputError(f"{path} has a header and no rows; write one for every measured run")
    reasons = Counter(one.reason for one in scored).most_common(_REASONS)
    told = "\n".join(f"  {number} x {reason}" for reason, number in reasons)
    raise InputError(f"{path}: no row of {len(scored)} can be used; these are the reasons:\n{told}")


def _row(one: Scored) -> dict[str, Any]:
    return {key: value for key, value in asdict(one).items() if key in _SHOWN}


def _plain(groups: Mapping[str, Quality | Regret]) -> dict[str, Any]:
    return {name: asdict(quality) for name, quality in groups.items()}


def _print(
    scored: list[Scored],
    groups: dict[str, Quality],
    memory: dict[str, Quality],
    picks: dict[str, Regret],
) -> None:
    from rich.console import Console

    console = Console()
    console.print("Predicted against measured step time, each run with its own configuration.\n")
    console.print(_errors(groups))
    if memory:
        console.print("\nPeak memory of a GPU, by what the measured figure counts.\n")
        console.print(_errors(memory))
    if picks:
        console.print(
            "\nPicks: of runs of one model on the same GPUs with one batch, by how much the run "
            "predicted fastest was slower than the fastest.\n"
        )
        console.print(_regrets(picks))
    _print_left_out(scored, console)


def _print_runs(scored: list[Scored]) -> None:
    """Each run of an own file; seconds of a step, and GiB of a GPU where the file has them."""
    from rich.console import Console

    from bigplan.report.text import seconds_text

    console = Console()
    table = _table("run", "measured", "predicted", "error", "GiB", "predicted")
    for one in scored:
        times = (one.measured_step_s, one.predicted_step_s)
        peaks = (one.measured_peak_gb, one.predicted_peak_gb)
        error = "skipped" if one.error_pct is None else f"{one.error_pct:+.1f}%"
        told = ["" if seconds is None else seconds_text(seconds) for seconds in times]
        table.add_row(one.id, *told, error, *("" if gib is None else f"{gib:.1f}" for gib in peaks))
    console.print("Every run: a step, and the peak memory of a GPU.\n")
    console.print(table)
    console.print()


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(*columns, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _errors(groups: dict[str, Quality]) -> Table:
    table = _table("table", "rows", "mean error", "median", "bias", "rank correlation")
    for name, quality in groups.items():
        table.add_row(
            name,
            str(quality.n),
            f"{quality.mape:.1f}%",
            f"{quality.median_ape:.1f}%",
            f"{quality.bias:+.1f}%",
            "" if quality.spearman is None else f"{quality.spearman:.3f}",
        )
    return table


def _regrets(picks: dict[str, Regret]) -> Table:
    table = _table("table", "choices", "mean regret", "largest")
    for name, one in picks.items():
        table.add_row(name, str(one.sweeps), f"{one.mean:.1f}%", f"{one.largest:.1f}%")
    return table


def _print_left_out(scored: list[Scored], console: Console) -> None:
    skipped = [one for one in scored if one.status == "skipped"]
    for reason, number in Counter(one.reason for one in skipped).most_common():
        names = ", ".join(one.id for one in skipped if one.reason == reason)
        which = f"{number} ({names})" if number <= _REASONS else str(number)
        console.print(f"skipped {which}: {reason}", style="dim", markup=False)
    untrusted = sum(one.status == "scored" and one.trust == "C" for one in scored)
    if untrusted:
        told = f"in no table {untrusted}: of trust C; `--json` has their predictions"
        console.print(told, style="dim", markup=False)
