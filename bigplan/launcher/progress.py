"""Progress of a run: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bigplan.launcher.record import Metric
from bigplan.units import format_count, format_seconds

LINES = 15  # at most about so many lines a run where there is no terminal


@contextmanager
def progress(
    console: Console, steps: int, predicted_seconds: float
) -> Iterator[Callable[[Metric], None]]:
    """A function to call after every step."""
    if not console.is_terminal:
        every = max(1, -(-steps // LINES))

        def line(metric: Metric) -> None:
            if metric.step % every == 0 or metric.step in (1, steps):
                text = f"step {metric.step:>{len(str(steps))}}/{steps}"
                figures = _figures(metric, predicted_seconds)
                console.print(f"{text}  {figures}", highlight=False, soft_wrap=True)

        yield line
        return
    columns = (
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("steps", total=steps, figures="")

        def advance(metric: Metric) -> None:
            bar.update(task, advance=1, figures=_short_figures(metric, predicted_seconds))

        yield advance


def _figures(metric: Metric, predicted_seconds: float) -> str:
    ratio = metric.seconds / predicted_seconds
    return (
        f"loss {metric.loss:.4f}  {_speed(metric)}  {_short(metric.seconds)} a step, "
        f"x{ratio:.2f} of the prediction"
    )


def _short_figures(metric: Metric, predicted_seconds: float) -> str:
    """Fits beside a bar in 80 columns."""
    return (
        f"loss {metric.loss:.3f}  {_speed(metric)}  {_short(metric.seconds)} "
        f"(predicted {_short(predicted_seconds)})"
    )


def _speed(metric: Metric) -> str:
    return f"{format_count(float(f'{metric.tokens_per_second:.3g}'))} tokens/s"


def _short(seconds: float) -> str:
    return format_seconds(float(f"{seconds:.3g}"))
