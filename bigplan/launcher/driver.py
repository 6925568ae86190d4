"""One launch: refuse what cannot run, start the ranks, drive the steps, write the record."""

from __future__ import annotations

import platform
import shutil
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

import bigplan
from bigplan.engines import native_refusal
from bigplan.errors import BigplanError, RefusedError, WorkerError
from bigplan.launcher.actor import WorkerType
from bigplan.launcher.crew import Crew, Layout
from bigplan.launcher.progress import progress
from bigplan.launcher.record import (
    MEASURED,
    MemoryRow,
    Metric,
    Summary,
    append_metric,
    new_folder,
    write_start,
    write_summary,
    write_timeline,
)
from bigplan.launcher.session import ray_session, require_packages
from bigplan.plan import Plan
from bigplan.planner import simulate_plan
from bigplan.timeline import Timeline

if TYPE_CHECKING:
    from bigplan.runtime.result import Finished, StepResult

WINDOW = 32  # steady steps among which the median is taken; older timelines are dropped
PACKAGES = ("torch", "ray", "numpy")

Status = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class LaunchOptions:
    """How to run a plan; None: the plan's steps, a local Ray."""

    steps: int | None = None
    address: str | None = None
    run_dir: Path = Path("runs")


@dataclass
class _Run:
    """What is known of a run so far."""

    plan: Plan
    folder: Path
    metrics: list[Metric] = field(default_factory=list)
    steady: deque[tuple[float, Timeline]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    finished: list[Finished] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)


def launch(
    plan: Plan,
    options: LaunchOptions,
    console: Console | None = None,
    worker: WorkerType | None = None,
) -> Path:
    """Run the plan; the folder of the record. `worker` replaces the native runtime's.

    Raises RefusedError, PreflightError, InputError, WorkerError; what was measured until then is
    on record.
    """
    console = console or Console()
    refusal = native_refusal(plan.model, plan.training, plan.strategy, plan.placement)
    if refusal:
        raise RefusedError(
            f"this plan cannot be launched: {refusal}. Plan with --engine native for one that can"
        )
    require_packages()
    steps = options.steps or plan.training.steps
    predicted = simulate_plan(plan)
    run = _Run(plan, new_folder(options.run_dir.absolute(), plan.model.name))
    write_start(run.folder, plan, predicted)
    _announce(console, run, steps, options.address)
    status: Status = "failed"
    try:
        _with_ray(run, steps, options.address, (console, worker))
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        console.print(f"Interrupted after {len(run.metrics)} steps", highlight=False)
        raise
    except WorkerError as error:
        _keep_details(run, error)
        raise
    finally:
        _close(run, status)
    return run.folder


def _announce(console: Console, run: _Run, steps: int, address: str | None) -> None:
    where = f"the Ray cluster at {address}" if address else "a local Ray"
    ranks = run.plan.strategy.ranks
    console.print(
        f"Launching {run.plan.model.name}: {ranks} rank{'s' if ranks > 1 else ''} on {where}, "
        f"{steps} steps, record in {run.folder}",
        highlight=False,
        soft_wrap=True,
    )


def _with_ray(
    run: _Run, steps: int, address: str | None, told: tuple[Console, WorkerType | None]
) -> None:
    console, worker = told
    layout = Layout.of(run.plan)
    scratch = _scratch(run)
    with ray_session(address, layout.cores * layout.ranks, layout.cuda):
        crew = Crew(run.plan, scratch, address is None, worker)
        try:
            _train(run, crew, steps, console)
        finally:
            crew.dismiss()
            shutil.rmtree(scratch, ignore_errors=True)


def _scratch(run: _Run) -> Path:
    """On the drives that the cluster names, else beside the record."""
    nvme = run.plan.cluster.group.nvme
    if nvme is not None and nvme.path is not None:
        return Path(nvme.path).expanduser().absolute() / f"bigplan-{run.folder.name}"
    return run.folder / "scratch"


def _train(run: _Run, crew: Crew, steps: int, console: Console) -> None:
    crew.ask("preflight", doing="checking its machine")
    crew.ask("start", crew.meeting_point(), doing="starting")
    run.started = time.perf_counter()
    with progress(console, steps, run.plan.predicted.step_seconds) as show:
        for step in range(1, steps + 1):
            show(_recorded(run, step, crew.ask("step", doing=f"running step {step}")))
    run.finished += crew.ask("finish", doing="finishing")
    crew.ask("close", doing="closing")


def _recorded(run: _Run, step: int, results: list[StepResult]) -> Metric:
    seconds = max(result.seconds for result in results)
    metric = Metric(
        step=step,
        loss=results[0].loss,
        seconds=seconds,
        tokens_per_second=run.plan.training.tokens_per_step / seconds,
    )
    if len(run.metrics) == 1:
        run.steady.clear()  # the first step is not steady: it stands in only while it is alone
    run.metrics.append(metric)
    run.steady.append((results[0].seconds, results[0].timeline))
    append_metric(run.folder, metric)
    return metric


def _close(run: _Run, status: Status) -> None:
    """Write what is known; leave no folder where nothing ran and nothing is to be read."""
    if not run.metrics and not (run.folder / "error.txt").exists():
        shutil.rmtree(run.folder, ignore_errors=True)
        return
    median = None
    if run.steady:
        ordered = sorted(run.steady, key=lambda item: item[0])
        median = ordered[(len(ordered) - 1) // 2][1]
        write_timeline(run.folder / MEASURED, median)
    write_summary(run.folder, _summary(run, status))


def _summary(run: _Run, status: Status) -> Summary:
    steady = [metric.seconds for metric in run.metrics[1:] or run.metrics]
    notes = list(dict.fromkeys(note for f in run.finished for note in f.notes))
    digests = {finished.digest for finished in run.finished}
    if len(digests) > 1:
        notes.insert(0, "The ranks ended with different weights: this run's result is wrong.")
    return Summary(
        status=status,
        steps=len(run.metrics),
        ranks=run.plan.strategy.ranks,
        seconds=time.perf_counter() - run.started,
        predicted_step_seconds=run.plan.predicted.step_seconds,
        measured_step_seconds=statistics.median(steady) if steady else None,
        memory=_memory(run),
        versions=_versions(),
        notes=tuple(notes),
        digest=run.finished[0].digest if run.finished else "",
    )


def _memory(run: _Run) -> tuple[MemoryRow, ...]:
    """The worst GPU, and the first node's ranks together."""
    node = run.finished[: Layout.of(run.plan).per_node]
    rows = []
    for use in run.plan.predicted.memory:
        tier = str(use.tier)
        measured = None
        if run.finished:
            if use.scope == "gpu":
                measured = max(finished.memory.get(tier, 0) for finished in run.finished)
            else:
                measured = sum(finished.memory.get(tier, 0) for finished in node)
        rows.append(
            MemoryRow(
                tier=tier,
                scope=use.scope,
                predicted=use.used_bytes,
                measured=measured,
                capacity=use.capacity_bytes,
            )
        )
    return tuple(rows)


def _versions() -> dict[str, str]:
    found = {"bigplan": bigplan.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _keep_details(run: _Run, error: BigplanError) -> None:
    """The worker's own traceback, for whoever looks for the bug."""
    details = "\n".join(getattr(error, "__notes__", []))
    if details:
        path = run.folder / "error.txt"
        path.write_text(details)
        error.args = (f"{error} (details in {path})",)
