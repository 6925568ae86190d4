"""Plans and CPU time of two checkouts' searches, side by side.

Usage: python -m benchmarks.search_compare run OUT.jsonl [CASE ...]    (ten minutes of a core)
       python -m benchmarks.search_compare show BEFORE.jsonl AFTER.jsonl

`run` searches with the bigplan that is imported: PYTHONPATH names another checkout. Cases are the
twelve of search_pins, the first sixteen of search_surcharge, and eight of a few layers on
small machines. A line per case has the simulated step's seconds, their mean over what a CPU
reaches, the bound, plans, CPU seconds and the plan. `show` prints what changed, and the means.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from math import exp, log
from pathlib import Path
from typing import Any

from benchmarks import search_pins, search_surcharge
from bigplan.errors import BigplanError
from bigplan.planner import Request
from bigplan.solve.candidate import Workload
from bigplan.solve.search import Scope, search
from bigplan.solve.simplicity import mechanisms
from bigplan.spec.experiment import make_experiment

Case = dict[str, Any]
DRAWN = 16  # cases of search_surcharge
FP16 = {"precision": "fp16"}


def _case(model: str, cluster: str, training: dict[str, Any], **more: Any) -> Case:
    sizes = {f"training.{name}": value for name, value in training.items()}
    return {"model": model, "cluster": cluster, **sizes, **more}


def _few(
    layers: int, model: str, cluster: str, step: tuple[int, int], caps: str, **more: Any
) -> Case:
    """So many layers of a model, for a step of so many sequences of so many tokens.

    `caps`: the memory that GPUs and hosts are held to.
    """
    gpu, host = caps.split()
    sizes = {"global_batch": step[0], "sequence_length": step[1], **more}
    return _case(model, cluster, sizes, layers=layers, **{"caps.gpu": gpu, "caps.host": host})


FEW: dict[str, Case] = {
    "8b/4 t4": _few(4, "llama-3-8b", "t4-cloud", (16, 4096), "14GiB 43GiB", **FP16),
    "8b/4 h200 18": _few(4, "llama-3-8b", "h200-1x", (8, 1024), "18GiB 36GiB"),
    "8b/4 h200 14": _few(4, "llama-3-8b", "h200-1x", (8, 4096), "14000MiB 48GiB"),
    "7b/6 3090x4": _few(6, "qwen2.5-7b", "rtx-3090x4-workstation", (64, 4096), "9000MiB 64GiB"),
    "13b/4 4090": _few(4, "llama-2-13b", "rtx-4090-workstation", (16, 4096), "10GiB 20GiB"),
    "13b/8 4090": _few(8, "llama-2-13b", "rtx-4090-workstation", (8, 4096), "16GiB 32GiB"),
    "4b/8 4090x2": _few(8, "qwen3-4b", "rtx-4090x2-workstation", (32, 4096), "9GiB 40GiB"),
    "8b/6 h200 24": _few(6, "llama-3-8b", "h200-1x", (16, 4096), "24GiB 24GiB"),
}


def cases() -> dict[str, Case]:
    """Every case by name."""
    found = {f"pins {m} {c}": _case(m, c, t) for m, c, t in search_pins.CASES}
    for model, cluster, (batch, length) in islice(search_surcharge.cases(), DRAWN):
        sizes = {"sequence_length": length, "global_batch": batch}
        found[f"{model} {cluster} {batch}x{length}"] = _case(model, cluster, sizes)
    return found | FEW


def searched(case: Case) -> dict[str, Any]:
    """What the case's search finds and takes."""
    start, layers = time.process_time(), case.get("layers")
    try:
        request = Request.of(make_experiment({k: v for k, v in case.items() if k != "layers"}))
        model = request.model
        if layers is not None:
            model = model.model_copy(update={"layers": layers})
        found = search(Workload(model, request.training, request.cluster.group), Scope(told=False))
    except BigplanError:
        return {"seconds": None, "cpu": time.process_time() - start}
    best = found.best
    strategy = " ".join(f"{k}={v}" for k, v in best.candidate.strategy if v not in (0, 1, ()))
    return {
        "seconds": best.seconds,
        "expected": best.expected,
        "bound": found.bound,
        "plans": found.programs,
        "cpu": time.process_time() - start,
        "plan": f"{strategy or '-'}; {','.join(sorted(mechanisms(best.placement))) or '-'}",
    }


def run(out: Path, names: list[str]) -> None:
    """Write a line per case."""
    every = cases()
    with out.open("a") as lines:
        for name in names or every:
            print(json.dumps({"case": name, **searched(every[name])}), file=lines, flush=True)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["case"]: row for row in rows}


def show(before: Path, after: Path) -> None:
    """Print both checkouts' seconds, and the means over cases that both have."""
    old, new = _read(before), _read(after)
    print(f"{'case':44s} {'step s':>10s} {'change':>8s} {'mean':>8s} {'CPU s':>7s} {'change':>7s}")
    steps, means, cpus = list[float](), list[float](), [0.0, 0.0]
    for name in (n for n in new if n in old):
        a, b = old[name], new[name]
        if a["seconds"] is None is b["seconds"]:
            continue
        if a["seconds"] is None or b["seconds"] is None:
            print(f"{name:44s} {a['seconds']} {b['seconds']}")
            continue
        step, mean = (log(b[key] / a[key]) for key in ("seconds", "expected"))
        steps.append(step)
        means.append(mean)
        cpus = [cpus[0] + a["cpu"], cpus[1] + b["cpu"]]
        print(
            f"{name:44s} {a['seconds']:10.4f} {exp(step) - 1:+8.2%} {exp(mean) - 1:+8.2%} "
            f"{a['cpu']:7.2f} {b['cpu'] / a['cpu'] - 1:+7.1%}"
            + (f"  {a['plan']} -> {b['plan']}" if a["plan"] != b["plan"] else "")
        )
    worst = max(steps, default=0.0)
    print(
        f"{len(steps)} cases: steps {exp(sum(steps) / len(steps)) - 1:+.3%} in the mean, "
        f"{exp(worst) - 1:+.2%} at most; means {exp(sum(means) / len(means)) - 1:+.3%}, "
        f"{exp(max(means)) - 1:+.2%} at most; CPU {cpus[0]:.0f} -> {cpus[1]:.0f} s "
        f"({cpus[1] / cpus[0] - 1:+.1%})"
    )


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]), sys.argv[3:])
    else:
        show(Path(sys.argv[2]), Path(sys.argv[3]))
