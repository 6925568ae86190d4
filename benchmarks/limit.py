"""Out-of-memory training on one GPU: plans first, then runs, predicted beside measured.

    limit.py predict OUT [CASE ...]   write OUT/CASE.plan.yaml and OUT/predictions.json, no GPU
    limit.py run OUT [CASE ...]       run those plans one after the other, one process each
    limit.py table OUT                step seconds and memory, predicted beside measured, and the
                                      mean and worst error of each over all cases

Cases are the experiment files in benchmarks/limit/, given by how their names begin; none given are
all. A run goes through the runtime's worker alone: what `bigplan launch` adds is Ray's start,
outside of the steps. The first step, which warms up, is not in the measured median. Beside every
step stand the GPU's mean SM clock and power, where NVML tells.

Environment: LIMIT_CLUSTER is a cluster file in place of the cases' own (cases d* want one with a
drive), LIMIT_STEPS the number of steps of a run (5), LIMIT_SECONDS the time of a case (200), which
begins no step that would end after it but always the first two; LIMIT_SCRATCH a folder for state on
a drive. With LIMIT_TRACE, a run also writes the actions of its median step.
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
    from bigplan.profile.sensors import Reading
    from bigplan.runtime.worker import Worker
    from bigplan.timeline import Timeline

CASES = Path(__file__).parent / "limit"
STEPS = int(os.environ.get("LIMIT_STEPS", "5"))
SECONDS = float(os.environ.get("LIMIT_SECONDS", "200"))
GRACE = 60.0  # seconds after its time in which a case may still end of itself
READ_EVERY = 0.25  # seconds between looks at the GPU's clock and power
TIERS = ("gpu", "host", "nvme")


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
        command = [sys.executable, __file__, "one", str(out), case.stem]
        try:
            done = subprocess.run(command, env=environment, timeout=SECONDS + GRACE, check=False)
        except subprocess.TimeoutExpired:
            print(f"  {case.stem}: ended after {SECONDS + GRACE:.0f} s", flush=True)
            continue
        if done.returncode:
            print(f"  {case.stem}: failed with exit code {done.returncode}", flush=True)


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
        steps = measured_steps(worker, started + SECONDS)
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
        "gpu_state": state_of(steps[1:]),
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


def measured_steps(worker: Worker, end: float) -> list[dict[str, Any]]:
    """STEPS steps, or as many as end by `end`, of which two are run in any case."""
    steps: list[dict[str, Any]] = []
    while len(steps) < max(2, STEPS):
        if len(steps) >= 2 and time.perf_counter() + steps[-1]["seconds"] > end:
            print(f"  time is over after {len(steps)} steps", flush=True)
            break
        steps.append(measured_step(worker))
    return steps


def state_of(steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Mean SM clock in Hz and power in W over these steps, and what limited the clock."""
    from bigplan.profile.sensors import mean, told

    readings: list[Reading] = [reading for step in steps for reading in step["readings"]]
    found = mean(readings)
    if found is None:
        return None
    return {"clock_hertz": found.clock, "power_watts": found.power, "told": told(found)}


def measured_step(worker: Worker) -> dict[str, Any]:
    """One step: seconds, loss, timeline, and what device and allocator did in it."""
    import torch

    from bigplan.profile.sensors import watching

    before = torch.cuda.memory_stats()
    with watching(torch.device("cuda", torch.cuda.current_device()), READ_EVERY) as watch:
        result = worker.step()
    after = torch.cuda.memory_stats()
    step = f"step {result.step}: {result.seconds:.3f} s, loss {result.loss:.4f}"
    print(f"  {step}; {str(watch) or 'clock not known'}", flush=True)
    return {
        "seconds": result.seconds,
        "loss": result.loss,
        "retries": after["num_alloc_retries"] - before["num_alloc_retries"],
        "device_allocs": after["num_device_alloc"] - before["num_device_alloc"],
        "readings": watch.readings,
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
    errors: dict[str, dict[str, float]] = {what: {} for what in ("step", *TIERS)}
    print(
        f"{'case':26s} {'pred s':>8s} {'meas s':>8s} {'error':>7s} {'of floor':>8s} {'GHz':>5s}"
        "   GPU GiB pred/meas  host GiB pred/meas  drive GiB pred/meas"
    )
    for name, predicted in promised.items():
        path = out / f"{name}.json"
        if not path.exists():
            print(f"{name:26s} {predicted['step_seconds']:8.3f}  did not run")
            continue
        record = json.loads(path.read_text())
        measured = statistics.median(record["seconds"][1:])
        errors["step"][name] = predicted["step_seconds"] / measured - 1
        memory = []
        for tier in TIERS:
            here, there = predicted["memory"].get(tier, 0), record["memory"].get(tier, 0)
            if here or there:
                errors[tier][name] = here / there - 1 if there else float("inf")
            memory.append(f"{here / 2**30:8.2f}/{there / 2**30:8.2f}")
        clock = (record["gpu_state"] or {}).get("clock_hertz", float("nan")) / 1e9
        seconds = f"{predicted['step_seconds']:8.3f} {measured:8.3f} {errors['step'][name]:+7.1%}"
        floor = predicted["floor_seconds"] / measured
        print(f"{name:26s} {seconds} {floor:8.1%} {clock:5.2f}  {'  '.join(memory)}")
    print(f"{len(errors['step'])} of {len(promised)} cases ran")
    for what, by_case in errors.items():
        summary(what, by_case)


def summary(what: str, by_case: dict[str, float]) -> None:
    """Mean and worst error of one quantity."""
    if by_case:
        worst = max(by_case, key=lambda name: abs(by_case[name]))
        mean = statistics.mean(map(abs, by_case.values()))
        print(f"{what}: MAPE {mean:.2%}, worst {by_case[worst]:+.2%} ({worst})")


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
