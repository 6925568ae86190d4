"""Faults in a run over two nodes of two processes each; is its curve the same?

Usage: chaos.py --folder NEW [--faults 30] [--minutes 30] [--gap 5,18] [--seed 0] [--freezes 2]
    [--elastic]

The nodes are those of a Ray cluster on this machine, with processes and addresses of their own. A
fault is one of: kill -9 of a rank, of two ranks at once, of the launch (which is then resumed), of
a whole node (which comes back seconds later), or a rank that is frozen. The next comes a random
time after the run has gained a step, or, after some, while it still starts again. At the end the
run goes on for some steps, and is compared with one that nothing happened to: to the last bit, with
--elastic (where a lost node is planned around, so that sums have another order) by the largest
relative difference of losses.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bigplan.launcher.record import read_metrics, read_record
from bigplan.plan import save_plan
from tests.launcher.machines import Machines, machines, plan_of
from tests.launcher.soak import COMMAND, differences, workers

KINDS = ("rank", "rank", "two ranks", "launch", "node", "node")  # the last comes back
AWAY = (0.5, 4.0)  # seconds that a node is away
NOTICED = 50.0  # seconds until a frozen rank is
AGAIN = 0.3  # share of faults after which the next may come before a step is gained
FEW = 5  # steps before the first fault
MORE = 20  # steps after the last fault
MOST = 100_000  # steps: more than there is time for
PATIENCE = 300.0


@dataclass
class Chaos:
    """A run, and what happens to it."""

    nodes: Machines
    folder: Path
    draw: random.Random
    elastic: bool
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)  # launches that ended by themselves
    launch: subprocess.Popen[str] | None = None
    begun: float = field(default_factory=time.monotonic)

    def start(self, steps: int, name: str) -> None:
        """Launch, or resume what is there."""
        run = self.run(name)
        where = ["--resume", str(run)] if run else [str(self.folder / "plan.yaml")]
        if not run:
            where += ["--run-dir", str(self.folder / name)]
        options = ["--address", self.nodes.address, "--steps", str(steps), "--max-restarts", "10"]
        options += ["--checkpoint-every", "10"] + ["--elastic"] * self.elastic
        with (self.folder / f"{name}.txt").open("a") as out:
            self.launch = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "launch", *where, *options],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def run(self, name: str) -> Path | None:
        """The run's folder, once it is there."""
        found = sorted((self.folder / name).glob("*/plan.yaml"))
        return found[0].parent if found else None

    def done(self, name: str) -> int:
        """Steps on record."""
        run = self.run(name)
        return len(read_metrics(run)) if run else 0

    def until(self, steps: int, name: str) -> None:
        """Wait until so many are on record, or time is up; start again a launch that gave up."""
        end = time.monotonic() + PATIENCE
        while self.done(name) < steps and time.monotonic() < end:
            self.look(name)
            time.sleep(0.1)

    def look(self, name: str) -> None:
        """Start a launch again that has ended by itself."""
        assert self.launch is not None
        if self.launch.poll() is not None:
            last = (self.folder / f"{name}.txt").read_text().strip().splitlines()[-1:]
            self.failed.append(f"exit code {self.launch.returncode}: {' '.join(last)}")
            self.tell(f"the launch ended by itself, {self.failed[-1]}")
            self.start(MOST, name)

    def fault(self, kind: str, name: str) -> None:
        """Let one happen."""
        run = self.run(name)
        ranks = sorted(workers(run)) if run else []
        if kind in ("rank", "two ranks", "frozen") and not ranks:
            kind = "launch"  # it starts, and nobody is there yet
        self.faults[kind] += 1
        self.tell(f"fault {self.faults.total()}: {kind}, {self.done(name)} steps on record")
        if kind == "launch":
            assert self.launch is not None
            self.launch.kill()
            self.launch.wait()
            self.start(MOST, name)
        elif kind == "node":
            which = self.draw.choice("ab")
            self.nodes.lose(which)
            time.sleep(self.draw.uniform(*AWAY))
            self.nodes.add(which)
        else:
            number = signal.SIGSTOP if kind == "frozen" else signal.SIGKILL
            for pid in self.draw.sample(ranks, min(len(ranks), 2 if kind == "two ranks" else 1)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def tell(self, text: str) -> None:
        """A line with its time."""
        print(f"{time.monotonic() - self.begun:7.1f} s  {text}", flush=True)


def report(chaos: Chaos, seconds: float, reached: int) -> bool:
    """Print what came of it; whether the curves are the same.

    `seconds` is the time of the faults, at whose end `reached` steps were on record.
    """
    run, whole = chaos.run("chaos"), chaos.run("whole")
    assert run is not None
    assert whole is not None
    record, plain = read_record(run), read_record(whole)
    spent = sum(metric.seconds for metric in record.metrics if FEW < metric.step <= reached)
    lost = [restart.seconds for restart in record.summary.restarts]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(chaos.faults.items()))
    print(f"{chaos.faults.total()} faults in {seconds / 60:.1f} minutes: {kinds}")
    print(f"{len(record.metrics)} steps; effective training time {100 * spent / seconds:.1f}%")
    if lost:
        print(
            f"{len(lost)} restarts by the launch itself; from the loss to the next step's begin: "
            f"median {statistics.median(lost):.1f} s, at most {max(lost):.1f} s"
        )
    print(f"launches that ended by themselves: {len(chaos.failed)}")
    print(f"plans: {[(plan.after, plan.nodes) for plan in record.summary.plans]}")
    if chaos.elastic:
        pairs = zip(record.metrics, plain.metrics, strict=True)
        apart = max(abs((a.loss or 0) / (b.loss or 1) - 1) for a, b in pairs)
        print(f"curve: losses differ by {apart:.1e} at most from the uninterrupted run's")
        return apart < 1e-2
    found = differences(whole, run)
    print(f"curve: {'; '.join(found[:5]) or 'equal to the uninterrupted run, to the last bit'}")
    return not found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=30, help="after which no more faults come")
    parser.add_argument("--gap", default="5,18", help="seconds between two, at least and at most")
    parser.add_argument("--freezes", type=int, default=2, help="of the faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--folder", type=Path, required=True, help="a new one")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    numbers = {name: version(name) for name in ("ray", "torch", "numpy")}
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, Python {platform.python_version()}, {numbers}")
    print(f"{os.cpu_count()} cores; {' '.join(sys.argv)}", flush=True)
    draw = random.Random(given.seed)
    least, most = map(float, given.gap.split(","))
    kinds = [draw.choice(KINDS) for _ in range(given.faults - given.freezes)]
    for _ in range(given.freezes):
        kinds.insert(draw.randrange(2, len(kinds)), "frozen")
    save_plan(plan_of(MOST, dp=4, micro_batch=1, zero=1), given.folder / "plan.yaml")
    with machines() as nodes:
        chaos = Chaos(nodes, given.folder, draw, given.elastic)
        chaos.start(MOST, "chaos")
        chaos.until(FEW, "chaos")
        begun = time.monotonic()
        for kind in kinds:
            if time.monotonic() - begun > 60 * given.minutes:
                break
            before = chaos.done("chaos")
            chaos.fault(kind, "chaos")
            if draw.random() > AGAIN:
                chaos.until(before + 1, "chaos")
            gap = draw.uniform(least, most) + NOTICED * (kind == "frozen")
            end = time.monotonic() + gap
            while time.monotonic() < end:
                chaos.look("chaos")
                time.sleep(0.1)
        # Once more steps are done than ever: the last fault is overcome.
        chaos.until(chaos.done("chaos") + MORE, "chaos")
        seconds, reached = time.monotonic() - begun, chaos.done("chaos")
        steps = end_at(chaos)
        chaos.tell(f"uninterrupted, {steps} steps")
        chaos.start(steps, "whole")
        assert chaos.launch is not None
        assert chaos.launch.wait() == 0
        sys.exit(not report(chaos, seconds, reached))


def end_at(chaos: Chaos) -> int:
    """Stop the run and let it end after some more steps; their number."""
    assert chaos.launch is not None
    chaos.launch.send_signal(signal.SIGINT)
    chaos.launch.wait(PATIENCE)
    steps = chaos.done("chaos") + MORE
    chaos.start(steps, "chaos")
    assert chaos.launch.wait(PATIENCE) == 0, (chaos.folder / "chaos.txt").read_text()[-2000:]
    return steps


if __name__ == "__main__":
    main()
