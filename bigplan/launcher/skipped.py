"""When steps that change no weight end a run, and what is then told."""

from __future__ import annotations

from collections.abc import Sequence

from bigplan.launcher.record import Metric
from bigplan.spec.training import SMALLEST_SCALE


def idle(metric: Metric) -> bool:
    """Whether the step changed nothing, and lowered no loss scale either."""
    return metric.skipped and (metric.loss_scale is None or metric.loss_scale <= SMALLEST_SCALE)


def idle_since(metrics: Sequence[Metric]) -> int:
    """How many of the last steps, in a row, were idle."""
    count = 0
    for metric in reversed(metrics):
        if not idle(metric):
            break
        count += 1
    return count


def told(metric: Metric, count: int, kinds: Sequence[str]) -> str:
    """What to tell after so many idle steps; `kinds` of the model's layers, first to last."""
    scale = " with the smallest loss scale" if metric.loss_scale is not None else ""
    half = ", or train in bf16" if metric.loss_scale is not None else ""
    return (
        f"step {metric.step}: gradients were infinite or NaN in {count} step(s) in a row{scale}"
        f"{_where(metric.not_finite or (), kinds)}, and none of them changed the weights. Lower "
        f"the learning rate, look at the data and at the weights that the run began with{half}; "
        "--max-skipped N allows more such steps"
    )


def _where(layers: Sequence[int], kinds: Sequence[str]) -> str:
    """The layers with such gradients, from the model's end, where a backward pass begins."""
    if not layers:
        return ""
    first, number = max(layers), len(layers)
    if number == 1:
        return f", those of layer {first} ({kinds[first]}) alone"
    all_ = "all" if number == len(kinds) else str(number)
    return (
        f", those of {all_} layers; the first on the way back was layer {first} ({kinds[first]}), "
        f"the last layer {min(layers)} ({kinds[min(layers)]})"
    )
