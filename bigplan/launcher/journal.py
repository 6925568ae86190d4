"""What is known of a run so far, written down as it becomes known."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bigplan.installed import version_of
from bigplan.launcher.checkpoints import newest_step
from bigplan.launcher.metrics_file import MetricsFile
from bigplan.launcher.placing import Layout
from bigplan.launcher.record import (
    MEASURED,
    MemoryRow,
    Metric,
    PlanRun,
    Restart,
    Status,
    Summary,
    write_summary,
    write_timeline,
)
from bigplan.launcher.skipped import idle, idle_since
from bigplan.launcher.tensorboard import EventFile
from bigplan.launcher.weights_and_biases import WandbRun
from bigplan.plan import MemoryUse, Plan, digest
from bigplan.timeline import Timeline
from bigplan.version import __version__

if TYPE_CHECKING:
    from bigplan.runtime.result import Evaluated, Finished, StepResult

WINDOW = 32  # steady steps among which the median is taken; older timelines are dropped
PACKAGES = ("torch", "ray", "numpy")


@dataclass
class Journal:
    """A run's counts and figures; `done` steps lie behind, `target` is where it ends."""

    plan: Plan
    folder: Path
    target: int
    tensorboard: bool = True
    wandb: str | None = None  # project
    done: int = 0
    first: int = 0  # the steps that lay behind when this launch began
    begun: bool = False  # the ranks stand ready
    furthest: int = 0  # the most steps that were ever done
    idle: int = 0  # the last steps in a row that changed nothing
    resumed: tuple[int, ...] = ()
    restarts: tuple[Restart, ...] = ()
    plans: tuple[PlanRun, ...] = ()
    finished: list[Finished] = field(default_factory=list)
    metrics: MetricsFile = field(init=False)
    _seconds: list[float] = field(default_factory=list)  # of this plan's steps, lost ones included
    _progress: dict[int, float] = field(default_factory=dict)  # seconds by step, without lost ones
    _before: float = 0.0  # of the steps before it
    _steady: deque[tuple[float, Timeline]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _started: float = field(default_factory=time.perf_counter)
    _began: float | None = None  # this launch's first step
    _loss: tuple[float, str] | None = None  # when, and why, a rank was lost that is not replaced
    _events: EventFile | None = None
    _sent: WandbRun | None = None
    _stepped: bool = False
    _reason: str = ""  # why the plan is another one than before

    def __post_init__(self) -> None:
        self.metrics = MetricsFile(self.folder)

    def start(self, done: int) -> None:
        """Go on after `done` steps; what was recorded of later ones is forgotten."""
        kept = self.metrics.rewind(done)
        self._started = time.perf_counter()
        if self._loss is not None:
            when, reason = self._loss
            seconds = self._started - when
            lost = Restart(done=self.done, back_to=done, seconds=seconds, reason=reason)
            self.restarts, self._loss = (*self.restarts, lost), None
        self._progress = {step: took for step, took in self._progress.items() if step <= done}
        self._began = self._began or self._started
        self.done, self.first, self.begun = done, done, True
        self.idle = idle_since(kept)
        self.furthest = max(self.furthest, done)
        self._before = sum(metric.seconds for metric in kept)
        self._note_plan(done)
        if done:
            self.resumed = (*self.resumed, done)
        if self.tensorboard:
            self._events = EventFile(self.folder, done)
        if self.wandb is not None and self._sent is None:
            self._sent = WandbRun(self.wandb, self.folder, self.plan)
        self.note()

    def follow(self, before: Summary) -> None:
        """Go on with what is known of the launches before."""
        self.resumed, self.restarts, self.plans = before.resumed, before.restarts, before.plans

    def replan(self, plan: Plan, reason: str) -> None:
        """Go on with another plan, once its ranks start."""
        self.plan, self._reason = plan, reason
        self._steady.clear()
        self._seconds.clear()

    def _note_plan(self, done: int) -> None:
        plan = self.plan
        if self.plans and self.plans[-1].plan == digest(plan):
            return
        run = PlanRun(
            after=done,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            nodes=Layout.of(plan).nodes,
            strategy=plan.strategy,
            engine=plan.engine,
            predicted_step_seconds=plan.predicted.step_seconds,
            plan=digest(plan),
            reason=self._reason,
        )
        self.plans, self._reason = (*self.plans, run), ""

    def lose(self, reason: str) -> None:
        """A rank was lost: steps after the checkpoint that the next start() names do not count."""
        self._loss = self._loss or (time.perf_counter(), reason)
        if self._events is not None:
            self._events.close()
            self._events = None

    @property
    def active(self) -> bool:
        """Whether any step ended in this launch."""
        return self._stepped

    def record(
        self, results: list[StepResult], validated: Evaluated | None, checkpoint: int | None
    ) -> Metric:
        """One more step, as all ranks measured it."""
        self.done += 1
        self.furthest = max(self.furthest, self.done)
        metric = self._metric(results, validated, checkpoint)
        self.metrics.add(metric)
        self.idle = self.idle + 1 if idle(metric) else 0
        if self._events is not None:
            self._events.add(metric)
        if self._sent is not None:
            self._sent.add(metric)
        if len(self._seconds) == 1:
            self._steady.clear()  # the first step is not steady: it stands in only while alone
        self._seconds.append(metric.seconds)
        self._stepped = True
        self._progress[self.done] = metric.seconds
        strategy = self.plan.strategy
        first = results[:: strategy.shards * strategy.tp]  # of each stage
        self._steady.append((results[0].seconds, Timeline.together(r.timeline for r in first)))
        return metric

    def _metric(
        self, results: list[StepResult], validated: Evaluated | None, checkpoint: int | None
    ) -> Metric:
        first, predicted = results[0], self.plan.predicted
        seconds = max(result.seconds for result in results)
        memory = self._by_tier([result.memory for result in results])
        return Metric(
            step=self.done,
            loss=_finite(first.loss) if first.counted else None,
            uncounted=not first.counted,
            seconds=seconds,
            tokens_per_second=self.plan.training.tokens_per_step / seconds,
            learning_rate=first.learning_rate,
            gradient_norm=_finite(first.gradient_norm),
            loss_scale=first.loss_scale,
            skipped=first.skipped,
            not_finite=first.not_finite or None,
            data_seconds=max(result.data_seconds for result in results),
            mfu=predicted.mfu * predicted.step_seconds / seconds,
            memory={tier: nbytes for tier, nbytes in memory.items() if nbytes},
            validation_loss=_finite(validated.loss) if validated else None,
            rewards=_all_finite(first.rewards),
            validation_rewards=_all_finite(validated.rewards) if validated else None,
            checkpoint=checkpoint,
            restarts=len(self.restarts) or None,
        )

    def _by_tier(self, ranks: list[Mapping[str, int]]) -> dict[str, int]:
        """Bytes by tier of the stage that takes most."""
        measured: dict[str, int] = {}
        for use in self.plan.predicted.memory:
            tier = str(use.tier)
            measured[tier] = max(measured.get(tier, 0), self._measured(use, ranks))
        return measured

    def _measured(self, use: MemoryUse, ranks: list[Mapping[str, int]]) -> int:
        """Bytes of a stage's largest rank, or of a node full of such ranks."""
        strategy = self.plan.strategy
        each = strategy.shards * strategy.tp
        stage = ranks[use.stage * each : (use.stage + 1) * each]
        most = max((rank.get(str(use.tier), 0) for rank in stage), default=0)
        return self.plan.cluster.group.shared_by(strategy.ranks).counted(most, use.scope)

    def note(self) -> None:
        """The totals so far; without room they stay as they were, and come with the next ones."""
        with suppress(OSError):
            write_summary(self.folder, self._summary("running"))

    def close(self, status: Status) -> None:
        """Write all that is known."""
        for writer in (self._events, self._sent):
            if writer is not None:
                writer.close()
        if self._steady:
            ordered = sorted(self._steady, key=lambda item: item[0])
            write_timeline(self.folder / MEASURED, ordered[(len(ordered) - 1) // 2][1])
        write_summary(self.folder, self._summary(status))

    def _summary(self, status: Status) -> Summary:
        steady = self._seconds[1:] or self._seconds
        spent = sum(took for step, took in self._progress.items() if step > self.first)
        return Summary(
            status=status,
            steps=self.done,
            ranks=self.plan.strategy.ranks,
            seconds=self._before + spent,
            predicted_step_seconds=self.plan.predicted.step_seconds,
            measured_step_seconds=statistics.median(steady) if steady else None,
            memory=self._memory(),
            versions=_versions(),
            notes=tuple(self._notes()),
            digest=self.finished[0].digest if self.finished else "",
            target_steps=self.target,
            checkpoint=newest_step(self.folder),
            resumed=self.resumed,
            restarts=self.restarts,
            plans=self.plans,
            effective=self._effective(),
        )

    def _effective(self) -> float | None:
        if self._began is None or not self._progress:
            return None
        return sum(self._progress.values()) / (time.perf_counter() - self._began)

    def _notes(self) -> list[str]:
        notes = list(dict.fromkeys(note for f in self.finished for note in f.notes))
        if len({finished.digest for finished in self.finished}) > 1:
            notes.insert(0, "The ranks ended with different weights: this run's result is wrong.")
        if self._events is not None and self._events.trouble:
            notes.append(f"TensorBoard shows less than all: {self._events.trouble}")
        if self._sent is not None and self._sent.trouble:
            notes.append(f"Weights & Biases shows less than all: {self._sent.trouble}")
        return notes

    def _memory(self) -> tuple[MemoryRow, ...]:
        ranks = [finished.memory for finished in self.finished]
        return tuple(
            MemoryRow(
                stage=use.stage,
                tier=str(use.tier),
                scope=use.scope,
                predicted=use.used_bytes,
                measured=self._measured(use, ranks)
                if any(str(use.tier) in rank for rank in ranks)
                else None,
                capacity=use.capacity_bytes,
            )
            for use in self.plan.predicted.memory
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _all_finite(values: Mapping[str, float] | None) -> Mapping[str, float] | None:
    found = {name: value for name, value in (values or {}).items() if math.isfinite(value)}
    return found or None


def _versions() -> dict[str, str]:
    found = {"bigplan": __version__, "python": platform.python_version()}
    return found | {package: known for package in PACKAGES if (known := version_of(package))}
