"""Progress of a run: a bar with figures on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from bigplan.launcher.record import Metric
from bigplan.plan import Plan
from bigplan.units import format_bytes, format_count, format_seconds, rounded

LINES = 15  # at most about so many lines a run where there is no terminal
_GAP = "   "
_TIERS = {"gpu": "GPU", "host": "host", "nvme": "NVMe"}


class Show(Protocol):
    """What a run tells its user as it goes."""

    def step(self, metric: Metric) -> None:
        """One more step is done."""

    def say(self, text: str) -> None:
        """Something that stays on the screen."""


@dataclass(frozen=True)
class Promise:
    """What the plan predicts, to be shown beside what is measured."""

    seconds: float
    memory: Mapping[str, int]

    @classmethod
    def of(cls, plan: Plan) -> Promise:
        """A plan's step time, and bytes by tier on its worst stage."""
        memory: dict[str, int] = {}
        for use in plan.predicted.memory:
            memory[use.tier] = max(memory.get(use.tier, 0), use.used_bytes)
        return cls(plan.predicted.step_seconds, memory)


@contextmanager
def progress(console: Console, done: int, steps: int, promise: Promise) -> Iterator[Show]:
    """What to tell after every step; `done` of them lie behind."""
    if not console.is_terminal:
        yield _Lines(console, steps, max(1, -(-(steps - done) // LINES)), done + 1, promise)
        return
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=40),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with _ProgressBar(*columns, console=console) as bar:
        task = bar.add_task("steps", total=steps, completed=done)
        yield _Screen(bar, task, promise)


@dataclass(frozen=True)
class _Lines:
    console: Console
    steps: int
    every: int
    first: int
    promise: Promise

    def step(self, metric: Metric) -> None:
        told = metric.step % self.every == 0 or metric.step in (self.first, self.steps)
        if told or metric.validation_loss is not None:
            text = f"step {metric.step:>{len(str(self.steps))}}/{self.steps}"
            self.say("  ".join((text, *figures(metric, self.promise))))

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


@dataclass
class _Figures:
    """Lines of figures, as many as the width asks for."""

    cells: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in packed(self.cells, options.max_width):
            yield Text(line, no_wrap=True, overflow="ellipsis")


class _ProgressBar(Progress):
    """A progress bar with figures below it."""

    below = _Figures()

    def get_renderables(self) -> Iterable[RenderableType]:
        """See Progress."""
        yield Group(self.make_tasks_table(self.tasks), self.below)


@dataclass
class _Screen:
    bar: _ProgressBar
    task: TaskID
    promise: Promise
    validation: float | None = None

    def step(self, metric: Metric) -> None:
        if metric.validation_loss is not None:
            self.validation = metric.validation_loss
        shown = metric.model_copy(update={"validation_loss": self.validation})
        self.bar.below = _Figures(tuple(figures(shown, self.promise)))
        self.bar.update(self.task, completed=metric.step)

    def say(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)


def packed(cells: Sequence[str], width: int) -> list[str]:
    """Cells side by side on as few lines as hold them."""
    lines: list[str] = []
    for cell in cells:
        if lines and len(lines[-1]) + len(_GAP) + len(cell) <= width:
            lines[-1] += _GAP + cell
        else:
            lines.append(cell)
    return lines


def figures(metric: Metric, promise: Promise) -> Iterator[str]:
    """Loss, speed, step time and memory, each with what was predicted where that is known."""
    yield f"loss {metric.loss_text}"
    if metric.validation_loss is not None:
        yield f"validation {metric.validation_loss:.4f}"
    if metric.rewards is not None:
        yield "".join(_rewards(metric.rewards))
    if metric.skipped:
        yield "skipped: overflow"
    yield f"{format_count(rounded(metric.tokens_per_second))} tokens/s"
    if metric.mfu is not None:
        yield f"MFU {100 * metric.mfu:.3g}%"
    yield f"step {_seconds(metric.seconds)} (predicted {_seconds(promise.seconds)})"
    for tier, nbytes in metric.memory.items():
        promised = promise.memory.get(tier, 0)
        if nbytes or promised:
            beside = f" of {_bytes(promised)}" if promised else ""
            yield f"{_TIERS.get(tier, tier)} {_bytes(nbytes)}{beside}"


def _rewards(rewards: Mapping[str, float]) -> Iterator[str]:
    """How many pairs are told apart rightly, and how clearly."""
    if "accuracy" in rewards:
        yield f"right {rewards['accuracy']:.0%}"
    if "margin" in rewards:
        yield f" by {rewards['margin']:.3g}"


def _seconds(seconds: float) -> str:
    return format_seconds(rounded(seconds))


def _bytes(nbytes: int) -> str:
    number, unit = format_bytes(nbytes).split()
    return f"{rounded(float(number)):g} {unit}"
