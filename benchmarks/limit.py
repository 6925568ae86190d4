"""Out-of-memory training on one GPU: plans first, then runs, predicted beside measured.

    limit.py predict OUT [CASE ...]   write OUT/CASE.plan.yaml and OUT/predictions.json, no GPU
    limit.py run OUT [CASE ...]       run those plans one after the other, one process each
    limit.py table OUT                step seconds and memory, predicted beside measured

Cases are the experiment files in benchmarks/limit/, given by how their names begin; none given are
all. A run goes through the runtime's worker alone: what `bigplan launch` adds is Ray's start,
outside of the steps. The first step, which warms up, is not in the measured median.

Environment: LIMIT_CLUSTER is a cluster file in place of the cases' own, LIMIT_STEPS the number of
steps of a run (5), LIMIT_SCRATCH a folder for state on a drive; with LIMIT_TRACE, a run also writes
the actions of its median step.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigplan.plan import Plan
    from bigplan.runtime.worker import Worker
    from bigplan.timeline import Timeline

CASES = Path(__file__).parent / "limit"
STEPS = int(os.environ.get("LIMIT_STEPS", "5"))


def cases(names: list[str]) -> list[Path]:
    """The experiment files, in order."""
    found = sorted(CASES.glob("*.yaml"))
    return [path for path in found if not names or any(path.stem.startswith(n) for n in names)]


def predict(out: Path, names: list[str]) -> None:
    """Plan every case and write down what is promised."""
    from bigplan.errors import BigplanError
    from bigplan.plan import load_plan, save_plan

    out.mkdir(parents=True, exist_ok=True)
    path = out / "predictions.json"
    promised: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for case in cases(names):
        try:
            plan = plan_of(case)
        except BigplanError as error:
            print(f"{case.stem}: {error}")
            continue
        save_plan(plan, out / f"{case.stem}.plan.yaml")
        load_plan(out / f"{case.stem}.plan.yaml")  # a run must be able to read it
        predicted = plan.predicted
        promised[case.stem] = {
            "step_seconds": predicted.step_seconds,
            "floor_seconds": predicted.step_seconds_overlapped,
            "busy_seconds": dict(predicted.busy_seconds),
            "op_seconds": dict(predicted.op_seconds),
            "moved_bytes": dict(predicted.moved_bytes),
            "memory": {str(use.tier): use.used_bytes for use in predicted.memory},
            "strategy": plan.strategy.model_dump(exclude_defaults=True),
        }
        print(f"{case.stem}: {predicted.step_seconds:.3f} s", flush=True)
    path.write_text(json.dumps(promised, indent=1))


def plan_of(case: Path) -> Plan:
    """The plan that `bigplan plan` makes of an experiment file. Raises BigplanError."""
    from bigplan.planner import Request, make_plan
    from bigplan.spec.experiment import load_experiment

    cluster = os.environ.get("LIMIT_CLUSTER")
    experiment = load_experiment(case, {"cluster": cluster} if cluster else {})
    return make_plan(
        Request(
            experiment.model_spec(),
            experiment.resolved_training(),
            experiment.cluster_spec(),
            experiment.set,
            experiment.engine,
        )
    )


def run(out: Path, names: list[str]) -> None:
    """Each case in a process of its own."""
    environment = dict(os.environ)
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    environment.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    for case in cases(names):
        plan = out / f"{case.stem}.plan.yaml"
        if not plan.exists():
            continue
        print(f"== {case.stem}", flush=True)
        subprocess.run(
            [sys.executable, __file__, "one", str(out), case.stem], env=environment, check=False
        )


def one(out: Path, name: str) -> None:
    """Run one plan here; its steps, actions and memory to OUT/NAME.json."""
    import torch

    from bigplan.plan import load_plan
    from bigplan.runtime.worker import Worker

    plan = load_plan(out / f"{name}.plan.yaml")
    worker = Worker(plan, 0, 1, Path(os.environ.get("LIMIT_SCRATCH", "/tmp/limit-scratch")))
    started = time.perf_counter()
    worker.preflight()
    worker.start("")
    ready = time.perf_counter() - started
    try:
        steps = [measured_step(worker) for _ in range(STEPS)]
        finished = worker.finish()
    finally:
        worker.close()
    ordered = sorted(steps[1:], key=lambda step: step["seconds"])
    timeline: Timeline = ordered[(len(ordered) - 1) // 2]["timeline"]
    record = {
        "seconds": [step["seconds"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "retries": [step["retries"] for step in steps],
        "device_allocs": [step["device_allocs"] for step in steps],
        "start_seconds": ready,
        "memory": {str(tier): used for tier, used in finished.memory.items()},
        "max_reserved": torch.cuda.max_memory_reserved(),
        "max_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "op_seconds": timeline.total_by(lambda event: event.op),
        "busy_seconds": timeline.total_by(lambda event: event.lane),
    }
    (out / f"{name}.json").write_text(json.dumps(record, indent=1))
    if os.environ.get("LIMIT_TRACE"):
        events = [
            [e.lane, e.op, e.layer, e.micro_batch, round(e.start, 5), round(e.end, 5)]
            for e in timeline.events
        ]
        (out / f"{name}.trace.json").write_text(json.dumps(events))
    tell(name, json.loads((out / "predictions.json").read_text())[name], record)


def measured_step(worker: Worker) -> dict[str, Any]:
    """One step: seconds, loss, timeline, and what the device's allocator did in it."""
    import torch

    before = torch.cuda.memory_stats()
    result = worker.step()
    after = torch.cuda.memory_stats()
    print(f"  step {result.step}: {result.seconds:.3f} s, loss {result.loss:.4f}", flush=True)
    return {
        "seconds": result.seconds,
        "loss": result.loss,
        "retries": after["num_alloc_retries"] - before["num_alloc_retries"],
        "device_allocs": after["num_device_alloc"] - before["num_device_alloc"],
        "timeline": result.timeline,
    }


def tell(name: str, predicted: dict[str, Any], record: dict[str, Any]) -> None:
    """A run's step, its seconds by lane and by operation, and its memory: predicted / measured."""
    measured = statistics.median(record["seconds"][1:])
    print(
        f"  {name}: measured {measured:.3f} predicted {predicted['step_seconds']:.3f} "
        f"x{measured / predicted['step_seconds']:.3f}; start {record['start_seconds']:.0f} s; "
        f"retries {record['retries']} allocs {record['device_allocs']}"
    )
    for kind in ("busy_seconds", "op_seconds"):
        promised, found = predicted[kind], record[kind]
        both = (
            f"{key} {promised.get(key, 0.0):.3f}/{found.get(key, 0.0):.3f}"
            for key in promised | found
        )
        print("   ", ", ".join(both))
    for tier, used in record["memory"].items():
        nbytes = predicted["memory"].get(tier, 0)
        print(f"    {tier}: promised {nbytes / 2**30:.2f} measured {used / 2**30:.2f} GiB")


def table(out: Path) -> None:
    """Predicted beside measured, and how near the floor: the plan with perfect overlap."""
    promised = json.loads((out / "predictions.json").read_text())
    errors = []
    print(
        f"{'case':34s} {'pred s':>8s} {'meas s':>8s} {'error':>7s} {'of floor':>8s}"
        "  GPU GiB pred/meas   host GiB pred/meas"
    )
    for name, predicted in promised.items():
        path = out / f"{name}.json"
        if not path.exists():
            print(f"{name:34s} {predicted['step_seconds']:8.3f}  did not run")
            continue
        record = json.loads(path.read_text())
        measured = statistics.median(record["seconds"][1:])
        error = predicted["step_seconds"] / measured - 1
        errors.append(abs(error))
        gpu, host = (
            f"{predicted['memory'].get(tier, 0) / 2**30:7.2f}"
            f"/{record['memory'].get(tier, 0) / 2**30:7.2f}"
            for tier in ("gpu", "host")
        )
        seconds = f"{predicted['step_seconds']:8.3f} {measured:8.3f}"
        floor = predicted["floor_seconds"] / measured
        print(f"{name:34s} {seconds} {error:+7.1%} {floor:8.1%}  {gpu}    {host}")
    if errors:
        print(
            f"mean absolute error {statistics.mean(errors):.1%}, worst {max(errors):.1%}, "
            f"{len(errors)} cases"
        )


def main() -> None:
    """Read the command line."""
    match sys.argv[1:]:
        case ["predict", out, *names]:
            predict(Path(out), names)
        case ["run", out, *names]:
            run(Path(out), names)
        case ["one", out, name]:
            one(Path(out), name)
        case ["table", out]:
            table(Path(out))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
