"""Training over all GPUs of one machine: plans first, then runs, beside peers on the same machine.

    python -m benchmarks.hosts predict OUT            OUT/CASE.plan.yaml and OUT/predictions.json
    python -m benchmarks.hosts run OUT PART [MINUTES] the part's cases, each with its peers after it
    python -m benchmarks.hosts table OUT              all of it in one

Cases and peers stand in hosts/cases.yaml. HOSTS_CLUSTER is the cluster file that `bigplan profile`
made of this machine: it has the number of GPUs, a process each, with an equal part of the cores. A
case that has run keeps its prediction. Runs go through the runtime's worker alone and peers through
peers.ranks; OUT/hosts.log and OUT/peers.log have what they print. A record is that of the first
rank: its steps' seconds, which all wait for, its GPU's memory, and as much of the host's for each.
HOSTS_STEPS (4) is the number of steps, of which the first warms up and is not in the median.
HOSTS_SCRATCH is a folder for state on a drive. With HOSTS_TINY tiny models stand in for the cases.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.limit import note, promised, promises
from benchmarks.limit_table import (
    HEADING,
    beside,
    errors_of,
    measured,
    promise,
    seconds_of,
    summary,
)
from benchmarks.peers.run import Case as Peer
from benchmarks.peers.run import run as run_peer
from benchmarks.peers.run import tell as tell_peer
from benchmarks.peers.run import watch, why
from bigplan.errors import BigplanError
from bigplan.placement import Tier
from bigplan.plan import load_plan
from bigplan.ranks import Coordinates
from bigplan.spec.catalog import find_cluster
from bigplan.spec.experiment import Experiment, make_experiment
from bigplan.spec.files.document import Spec, load_document

CASES = Path(__file__).parent / "hosts" / "cases.yaml"
CLUSTER = os.environ.get("HOSTS_CLUSTER", "h200-1x")
STEPS = int(os.environ.get("HOSTS_STEPS", "4"))
SCRATCH = Path(os.environ.get("HOSTS_SCRATCH", "/tmp/hosts-scratch"))
START = 45.0  # seconds from a process's start to its first step, about


class Setting(Spec):
    """One way to run a peer."""

    arguments: str
    """a module below peers/, and its arguments"""
    micro_batch: int = Field(gt=0)
    """sequences, at most"""


class Case(Spec):
    """One training, ours and its peers."""

    part: str
    model: str
    length: int = Field(gt=0)
    sequences: int | None = Field(default=None, gt=0)
    """of a step, over all GPUs"""
    sequences_each: int | None = Field(default=None, gt=0)
    """of a step, on every GPU"""
    gpu_limit: float | None = Field(default=None, gt=0)
    """GiB of each GPU"""
    set: dict[str, int] = Field(default_factory=dict)
    """decisions pinned for bigplan"""
    moments: str = "fp32"
    """AdamW's, in bigplan alone"""
    peers: dict[str, Setting] = Field(default_factory=dict)

    def batch(self, gpus: int) -> int:
        """Sequences of a step."""
        return self.sequences or gpus * (self.sequences_each or 1)

    def experiment(self, gpus: int) -> Experiment:
        """What bigplan is to plan. Raises BigplanError."""
        wanted: dict[str, object] = {
            "model": self.model,
            "cluster": CLUSTER,
            "training.sequence_length": self.length,
            "training.global_batch": self.batch(gpus),
            "training.optimizer.learning_rate": 3e-5,
            "training.optimizer.moments": self.moments,
            "engine": "native",
        }
        if self.gpu_limit:
            wanted["caps.gpu"] = f"{self.gpu_limit:g} GiB"
        return make_experiment(wanted | {f"set.{key}": value for key, value in self.set.items()})

    def peer(self, setting: Setting, gpus: int, minutes: float) -> Peer:
        """The peer's processes: the same model, tokens and limit."""
        module, _, arguments = setting.arguments.partition(" ")
        batch = self.batch(gpus)
        words = [
            f"{gpus} peers.{module} {self.model} {arguments}",
            f"--tokens {batch * self.length}",
        ]
        words += [f"--length {self.length} --steps {STEPS}"]
        words += [f"--micro-batch {min(setting.micro_batch, batch // gpus)}"]
        if self.gpu_limit:
            words.append(f"--gpu-limit {self.gpu_limit:g}")
        return Peer(module="peers.ranks", arguments=" ".join(words), minutes=minutes)


class Cases(Spec):
    """The file."""

    cases: dict[str, Case]
    tiny: dict[str, Case]


def all_cases() -> dict[str, Case]:
    """By name, in order."""
    found = load_document(CASES, Cases)
    return found.tiny if os.environ.get("HOSTS_TINY") else found.cases


def gpus_here() -> int:
    """Of the cluster."""
    return find_cluster(CLUSTER).group.gpus_per_node


def predict(out: Path) -> None:
    """Plan every case that has not run, and write down what is promised."""
    out.mkdir(parents=True, exist_ok=True)
    for name, case in all_cases().items():
        if (out / f"{name}.json").exists():
            print(f"{name}: has run, so its prediction stays")
            continue
        try:
            told = promised(out, name, case.experiment(gpus_here()))
        except BigplanError as error:
            told = {"refused": str(error).splitlines()[0]}
            print(f"{name}: {error}")
        print(f"  {told.get('strategy', '')}", flush=True)
        note(out, name, told)


def run(out: Path, part: str, minutes: float) -> None:
    """The part's cases; one that the planner refused leaves its peers, which may do it."""
    end = time.monotonic() + 60 * minutes
    for name, case in all_cases().items():
        if case.part != part:
            continue
        if "strategy" in promises(out).get(name, {}):
            run_ours(out, name, end - time.monotonic())
        for peer, setting in case.peers.items():
            run_beside(out, f"{name}/{peer}", case, setting, end - time.monotonic())


def run_ours(out: Path, name: str, seconds: float) -> None:
    """One case, a process for each GPU, for at most so long; one that has run keeps its steps."""
    path, log = out / f"{name}.json", out / "hosts.log"
    if path.exists() and "seconds" in json.loads(path.read_text()):
        print(f"{name}: has run")
        return
    if seconds < START + 2.5 * promises(out)[name]["step_seconds"]:  # the first step is slower
        print(f"{name}: not started, {seconds:.0f} s are too few", flush=True)
        return
    path.unlink(missing_ok=True)
    begun = log.stat().st_size if log.exists() else 0
    ranks = load_plan(out / f"{name}.plan.yaml").strategy.ranks  # a plan may leave GPUs idle
    command = [sys.executable, "-m", "benchmarks.peers.ranks", str(ranks), "hosts", "rank"]
    ended = watch([*command, str(out.resolve()), name], log, seconds)
    with log.open("rb") as text:
        text.seek(begun)
        said = text.read().decode(errors="replace").splitlines()
    print(f"== {name}")
    print("\n".join(line for line in said if line.startswith("  ")), flush=True)
    if ended.code and not path.exists():
        path.write_text(json.dumps({"error": why(ended, seconds)}))
        print("\n".join(said[-12:]))


def run_beside(out: Path, name: str, case: Case, setting: Setting, seconds: float) -> None:
    """One peer, for at most so long; one that has told its steps keeps them."""
    path, log = out / "peers.json", out / "peers.log"
    records: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if "median_seconds" in records.get(name, {}):
        print(f"{name}: has run")
        return
    if seconds < START:
        print(f"{name}: not started, {seconds:.0f} s are too few", flush=True)
        return
    gpus = gpus_here()
    with log.open("a") as text:
        text.write(f"== {name}: {setting.arguments}\n")
    records[name] = run_peer(case.peer(setting, gpus, seconds / 60), log, seconds)
    path.write_text(json.dumps(records, indent=1))
    tell_peer(name, records[name])


def rank(out: Path, name: str) -> None:
    """One process of a case; the first keeps the record."""
    from benchmarks.limit_run import Amount, keep, tell, trained

    number = int(os.environ["RANK"])
    if number:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the process lives
    plan = load_plan(out / f"{name}.plan.yaml")
    meeting = Path(os.environ["PEERS_MEETING"])
    with trained(plan, SCRATCH, Amount(STEPS), number, meeting) as (steps, record):
        for tier, used in record["memory"].items():  # promised of the node, told by each rank
            record["memory"][tier] = used * (1 if tier == "gpu" else plan.strategy.ranks)
        (out / f"{name}.{number}.gpu").write_text(str(record["memory"]["gpu"]))
        if number == 0:
            keep(out / name, steps, record)
    tell(name, promises(out)[name], record)


def gpus_of(out: Path, name: str) -> list[tuple[int, int]]:
    """Bytes of every rank's GPU, promised and measured; none of a run that did not end."""
    plan = load_plan(out / f"{name}.plan.yaml")
    promised = {use.stage: use.used_bytes for use in plan.predicted.memory if use.tier is Tier.GPU}
    paths = [out / f"{name}.{number}.gpu" for number in range(plan.strategy.ranks)]
    if not all(path.exists() for path in paths):
        return []
    stages = (Coordinates.of(number, plan.strategy).stage for number in range(len(paths)))
    return [
        (promised[stage], int(path.read_text())) for stage, path in zip(stages, paths, strict=True)
    ]


def table(out: Path) -> None:
    """Every case, its peers below it, and the errors of each figure."""
    path = out / "peers.json"
    peers: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    errors: dict[str, dict[str, float]] = {}
    print(
        f"{gpus_here()} GPUs. A peer's x is of our step. The host's memory, as the first rank told."
    )
    print(HEADING)
    for name, told in promises(out).items():
        record_path = out / f"{name}.json"
        record = json.loads(record_path.read_text()) if record_path.exists() else {}
        ours = float("nan")
        if "refused" in told:
            print(f"{name:24s} {told['refused']}")
        elif "seconds" not in record:
            print(f"{name:24s} {promise(told)}  {record.get('error', 'not run')}")
        else:
            ours = seconds_of(record)
            print(f"{name:24s} {measured(told, record)}")
            for what, error in errors_of(told, record).items():
                if what != "gpu":
                    errors.setdefault(what, {})[name] = error
            for number, (here, there) in enumerate(gpus_of(out, name)):
                errors.setdefault("gpu", {})[f"{name}, rank {number}"] = here / there - 1
                print(f"    GPU of rank {number}: {here / 2**30:.2f}/{there / 2**30:.2f} GiB")
        for peer, beside_it in peers.items():
            if peer.startswith(f"{name}/"):
                print(f"    {peer:32s} {beside(beside_it, ours)}")
    for what, by_case in errors.items():
        summary(what, by_case)


def main() -> None:
    """Read the command line."""
    match sys.argv[1:]:
        case ["predict", out]:
            predict(Path(out))
        case ["run", out, part, *minutes]:
            run(Path(out), part, float(minutes[0]) if minutes else float("inf"))
        case ["rank", out, name]:
            rank(Path(out), name)
        case ["table", out]:
            table(Path(out))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
