"""Out-of-memory training on one GPU: plans first, then runs, predicted beside measured.

    python -m benchmarks.limit predict OUT [CASE ...]   OUT/CASE.plan.yaml and OUT/predictions.json
    python -m benchmarks.limit run OUT [CASE ...]       those plans run, one process each: CASE.json
    python -m benchmarks.limit table OUT [OUT ...]      all of it beside bounds and peers, in one
    python -m benchmarks.limit rows OUT [OUT ...]       the same as lines of results/limit.csv
    python -m benchmarks.limit drive OUT                what the drive did in the traced steps
    python -m benchmarks.limit touch GIB                so much host memory taken and given back
    python -m benchmarks.limit room CLUSTER FOLDER      a cluster file given all of FOLDER's drive

Cases are the experiment files in benchmarks/limit/, given by how their names begin; none given are
all. Planning needs no GPU; a case that has run keeps its prediction. A run goes through the
runtime's worker alone: what `bigplan launch` adds is Ray's start, outside of the steps. The first
step, which warms up, is not in the measured median. Beside every step stand the GPU's mean SM clock
and power, where NVML tells. `table` puts what peers.run left in OUT beside the cases of the same
model, tokens, sequence length and GPU memory.

A virtual machine's memory is slow where nothing has touched it yet, and may not even be counted as
available: `touch` first. A profile counts half of what is free on a drive, as a user may want the
rest: `room` counts all but 6 GiB. Rates of its host and drive change within minutes (limit_now.py):
where LIMIT_CLUSTER is given, a case is planned and predicted anew with those measured just before
it runs, and those after it are noted. First weights are those of one layer for all layers of a
kind, which changes losses and not seconds: one core draws about 95 M values a second, so that to
draw those of every layer took about 30 of the 58 s that a 13B run needed to start.

Environment: LIMIT_CLUSTER is a cluster file in place of the cases' own (cases d* want one with a
drive), LIMIT_STEPS the number of steps of a run (5), LIMIT_SECONDS the time of a case (200), which
begins no step that would end after it but always the first two, LIMIT_MINUTES the time of all
cases of a call; LIMIT_SCRATCH a folder for state on a drive. With LIMIT_TRACE, a run also writes
the actions of its median step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.limit_bound import bound_of
from benchmarks.limit_table import rows, table

if TYPE_CHECKING:
    from torch import Tensor

    from bigplan.plan import Plan
    from bigplan.spec.cluster import Cluster
    from bigplan.spec.experiment import Experiment

CASES = Path(__file__).parent / "limit"
CLUSTER = os.environ.get("LIMIT_CLUSTER")
STEPS = int(os.environ.get("LIMIT_STEPS", "5"))
SECONDS = float(os.environ.get("LIMIT_SECONDS", "200"))
MINUTES = float(os.environ.get("LIMIT_MINUTES", "inf"))
SCRATCH = Path(os.environ.get("LIMIT_SCRATCH", "/tmp/limit-scratch"))
GRACE = 90.0  # seconds besides its time in which a case measures the machine, starts and ends
START = 45.0  # seconds from a process's start to its first step, about
CLOSING = 25.0  # and from its last step to its end
CHUNK = 4 << 30  # bytes touched at a time: the kernel refuses more than it counts at that moment


def cases(names: list[str]) -> list[Path]:
    """The experiment files, in order."""
    found = sorted(CASES.glob("*.yaml"))
    return [path for path in found if not names or any(path.stem.startswith(n) for n in names)]


def predict(out: Path, names: list[str]) -> None:
    """Plan every case that has not run, and write down what is promised."""
    from bigplan.errors import BigplanError

    out.mkdir(parents=True, exist_ok=True)
    for case in cases(names):
        if (out / f"{case.stem}.json").exists():
            print(f"{case.stem}: has run, so its prediction stays")
            continue
        try:
            note(out, case.stem, promise(out, case, CLUSTER))
        except BigplanError as error:
            print(f"{case.stem}: {error}")


def promise(out: Path, case: Path, cluster: str | None) -> dict[str, Any]:
    """Plan a case, into OUT/CASE.plan.yaml, and tell what is promised. Raises BigplanError."""
    from bigplan.spec.experiment import load_experiment

    return promised(out, case.stem, load_experiment(case, {"cluster": cluster} if cluster else {}))


def promised(out: Path, name: str, experiment: Experiment) -> dict[str, Any]:
    """Plan it, into OUT/NAME.plan.yaml, and tell what is promised. Raises BigplanError."""
    from bigplan.plan import load_plan, save_plan

    plan, told = planned(experiment)
    save_plan(plan, out / f"{name}.plan.yaml")
    load_plan(out / f"{name}.plan.yaml")  # a run must be able to read it
    bound = told["bound"]
    seconds = f"{told['step_seconds']:.3f} s, bound {bound['seconds']:.3f} s ({bound['by']})"
    print(f"{name}: {seconds}", flush=True)
    return told


def planned(experiment: Experiment) -> tuple[Plan, dict[str, Any]]:
    """The plan that `bigplan plan` makes of an experiment, and what is told of it.

    Raises BigplanError.
    """
    from bigplan.planner import Request, make_plan, simulate_plan

    training = experiment.resolved_training()
    plan = make_plan(
        Request(
            experiment.model_spec(),
            training,
            experiment.cluster_spec(),
            experiment.set,
            experiment.engine,
        )
    )
    predicted = plan.predicted
    return plan, {
        "step_seconds": predicted.step_seconds,
        "overlapped_seconds": predicted.step_seconds_overlapped,
        "bound": bound_of(plan),
        "busy_seconds": simulate_plan(plan).total_by(lambda event: event.lane),
        "op_seconds": dict(predicted.op_seconds),
        "moved_bytes": dict(predicted.moved_bytes),
        "memory": {str(use.tier): use.used_bytes for use in predicted.memory if not use.stage},
        "strategy": plan.strategy.model_dump(exclude_defaults=True),
        "model": plan.model.name,
        "tokens": training.tokens_per_step,
        "length": training.sequence_length,
        "caps": dict(experiment.caps),
    }


def run(out: Path, names: list[str]) -> None:
    """Each case in a process of its own."""
    environment = dict(os.environ)
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    environment.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    promised = promises(out)
    end = time.monotonic() + 60 * MINUTES
    for case in cases(names):
        if case.stem not in promised:
            continue
        left = end - time.monotonic()
        if left < START + 2.5 * promised[case.stem]["step_seconds"]:  # the first step is slower
            print(f"== {case.stem}: not started, {left:.0f} s are too few", flush=True)
            continue
        print(f"== {case.stem}", flush=True)
        started, record = time.monotonic(), out / f"{case.stem}.json"
        environment["LIMIT_SECONDS"] = str(min(SECONDS, left - START - CLOSING))
        error = run_one(out, case.stem, environment, min(SECONDS + GRACE, left))
        if error and not record.exists():
            record.write_text(json.dumps({"error": error}))
        took = f"{time.monotonic() - started:.0f} s in all"
        print(f"  {case.stem}: {error + ', ' if error else ''}{took}", flush=True)


def run_one(out: Path, name: str, environment: dict[str, str], seconds: float) -> str:
    """One case in a process of its own, for at most so long; why it failed, or nothing."""
    command = [sys.executable, "-m", "benchmarks.limit", "one", str(out.resolve()), name]
    root = CASES.parents[1]
    try:
        done = subprocess.run(command, env=environment, timeout=seconds, check=False, cwd=root)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    return f"failed with exit code {done.returncode}" if done.returncode else ""


def one(out: Path, name: str) -> None:
    """Run one case here; its steps, actions and memory to OUT/NAME.json."""
    from bigplan.spec.files.dump import to_yaml

    if CLUSTER:
        drive = bool(promises(out)[name]["memory"].get("nvme"))
        cluster, before = machine_now(drive=drive)
        path = out / f"{name}.cluster.yaml"
        path.write_text(to_yaml(cluster))
        note(out, name, promise(out, CASES / f"{name}.yaml", str(path)) | {"before": before})
    run_plan(out, name)
    if CLUSTER:
        note(out, name, promises(out)[name] | {"after": machine_now(drive=drive)[1]})


def run_plan(out: Path, name: str) -> None:
    """Run OUT/NAME.plan.yaml here; its steps, actions and memory to OUT/NAME.json."""
    from benchmarks.limit_run import Amount, keep, tell, trained
    from bigplan.plan import load_plan

    plan = load_plan(out / f"{name}.plan.yaml")
    with trained(plan, SCRATCH, Amount(STEPS, SECONDS)) as (steps, record):
        keep(out / name, steps, record)
    tell(name, promises(out)[name], record)


def promises(out: Path) -> dict[str, Any]:
    """What is promised of every case, by name."""
    path = out / "predictions.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def note(out: Path, name: str, promised: dict[str, Any]) -> None:
    """Write down what is promised of a case."""
    text = json.dumps(promises(out) | {name: promised}, indent=1)
    (out / "predictions.json").write_text(text)


def machine_now(*, drive: bool) -> tuple[Cluster, dict[str, float]]:
    """LIMIT_CLUSTER with the machine's rates of this moment, and these."""
    from benchmarks.limit_now import cluster_now, rates_of

    assert CLUSTER is not None
    cluster = cluster_now(Path(CLUSTER), SCRATCH, drive=drive)
    rates = rates_of(cluster, drive=drive)
    told = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in rates.items())
    print(f"  now: {told} G/s", flush=True)
    return cluster, rates


def touch(gibibytes: int) -> None:
    """Have so much host memory in use once, in parts, by all cores."""
    from bigplan.runtime.memory.slab import aligned_empty
    from bigplan.runtime.memory.slab import touch as touch_pages

    Path("/proc/self/oom_score_adj").write_text("1000")  # if there is less, end this process
    parts: list[Tensor] = []
    started = time.perf_counter()
    while len(parts) * CHUNK < gibibytes << 30:
        parts.append(aligned_empty(CHUNK))
        touch_pages(parts[-1])
    print(f"{gibibytes} GiB touched in {time.perf_counter() - started:.1f} s", flush=True)


def main() -> None:
    """Read the command line."""
    match sys.argv[1:]:
        case ["predict", out, *names]:
            predict(Path(out), names)
        case ["run", out, *names]:
            run(Path(out), names)
        case ["one", out, name]:
            one(Path(out), name)
        case ["table", *outs] if outs:
            table([Path(out) for out in outs])
        case ["rows", *outs] if outs:
            rows([Path(out) for out in outs], sys.stdout)
        case ["drive", out]:
            from benchmarks.limit_drive import in_steps

            in_steps(Path(out))
        case ["touch", gibibytes]:
            touch(int(gibibytes))
        case ["room", cluster, folder]:
            from benchmarks.limit_drive import room

            room(Path(cluster), Path(folder))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
