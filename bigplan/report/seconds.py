"""Where the time goes: by resource, and the busiest GPU's step in parts."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from bigplan.plan import Predicted, StepParts
from bigplan.report.text import bar, percent, seconds_text, table

TRIFLE = 1e-4  # of the step
NAMED = 0.005  # of the step: a resource that holds it up for less is not named
ALL = 0.995
NEARLY = 0.9  # of the binding resource's seconds on the path: who works so long would bind next,
MUCH = 0.5  # unless this part of its own seconds is on the path already


def bound_text(predicted: Predicted) -> str:
    """What the step is bound by: resources on its critical path, with their seconds.

    "nvme write, 14.2 s of 19.6 s of the critical path (72%); gpu compute 5.1 s". A resource that
    works about as long off the path, or longer, is told too: it would bind if this one were less.
    """
    path, step = predicted.critical_path, predicted.step_seconds
    most = path[predicted.bottleneck]
    share = f"{seconds_text(most)} of {seconds_text(step)} of the critical path"
    first = f"{share} ({percent(most / step)})" if most < ALL * step else "all of the critical path"
    busy = {
        name: seconds
        for name, seconds in predicted.busy_seconds.items()
        if seconds > NEARLY * most and path.get(name, 0.0) < MUCH * seconds
    }
    others = {
        name: f"{name} {seconds_text(seconds)}"
        for name, seconds in path.items()
        if name != predicted.bottleneck and seconds > NAMED * step
    }
    for name, seconds in busy.items():
        how = "longer" if seconds > most else "nearly as long"
        beside = f"{name} works {how} beside it ({seconds_text(seconds)})"
        if name in others:
            beside = f"{others[name]}, busy {seconds_text(seconds)} in all"
        others[name] = beside
    return "; ".join([f"{predicted.bottleneck}, {first}", *others.values()])


def busy_table(busy: Mapping[str, float], path: Mapping[str, float], step_seconds: float) -> Table:
    """Seconds each resource works during a step (of the busiest stage), and those of them on the
    critical path; the resource with most of these binds.
    """
    columns = ("resource", "busy", "share of the step", "critical path", "")
    rows = table("Time by resource", *columns, right=("busy", "critical path"))
    binding = max(path, key=lambda name: path[name], default="")
    least = TRIFLE * step_seconds
    shown = {name: (path.get(name, 0.0), seconds) for name, seconds in busy.items()}
    shown = {name: both for name, both in shown.items() if max(both) > least}
    for name in sorted(shown, key=lambda name: shown[name], reverse=True):
        on_path, seconds = shown[name]
        share = seconds / step_seconds if step_seconds else 0.0
        rows.add_row(
            name,
            seconds_text(seconds),
            f"{bar(seconds, step_seconds)} {share:4.0%}",
            seconds_text(on_path) if on_path > least else "-",
            "binds" if name == binding else "",
        )
    return rows


def part_seconds(parts: StepParts) -> dict[str, float]:
    """The parts by what the user calls them, in the order of the step's description."""
    waits = f"waiting ({parts.waits_for} is busiest)" if parts.waits_for else "waiting"
    return {
        "compute": parts.compute,
        "recomputation": parts.recompute,
        "tensor-parallel collectives": parts.collectives,
        "optimizer and norms on the GPU": parts.update,
        "pipeline bubble": parts.bubble,
        waits: parts.waiting,
    }


def parts_table(parts: StepParts) -> Table:
    """The step of the busiest GPU; what it spends nothing on is left out."""
    rows = table("The step of the busiest GPU", "part", "seconds", "share", right=("seconds",))
    named = part_seconds(parts)
    whole = sum(named.values())
    for name, seconds in named.items():
        if seconds > TRIFLE * whole:
            share = f"{bar(seconds, whole)} {seconds / whole:4.0%}"
            rows.add_row(name, seconds_text(seconds), share)
    return rows
