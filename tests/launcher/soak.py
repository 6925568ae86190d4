"""Ends a launch again and again at random instants, resumes it, and compares its curve with an
uninterrupted one's.

Every launch is a process of its own, as from a shell. An end is one of: `kill -9` of the launch,
`kill -9` of a worker, Ctrl-C. The moment is drawn anew each time: after some more steps are on
record and a part of a second, or within the launch's first seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bigplan.launcher.checkpoints import newest_step
from bigplan.launcher.record import Metric, read_metrics, read_record

End = Literal["launch", "worker", "interrupt"]
ENDS: tuple[End, ...] = ("launch", "worker", "interrupt")
COMMAND = "import sys; sys.argv[0] = 'bigplan'; from bigplan.cli import main; main()"
EARLY = 0.2  # share of ends in the first seconds of a launch
EARLY_SECONDS = 12.0
LATE_SECONDS = 0.3
INTERRUPTED = 130  # exit code
PATIENCE = 300.0  # seconds for a launch to come to the drawn moment, or to end


@dataclass
class Soak:
    """Runs of `steps` steps in `folder`; each resumption takes the next of the `plans`."""

    plans: Sequence[Path]
    folder: Path
    steps: int
    every: int
    draw: random.Random
    ends: Sequence[End] = ENDS
    before: str = ""  # Python that a launch runs first
    told: list[str] = field(default_factory=list)

    def uninterrupted(self) -> Path:
        """A run of the first plan from its first step to its last."""
        with self._launch(str(self.plans[0]), "--run-dir", self._at("whole")) as process:
            code, text = self._wait(process)
        assert code == 0, text
        return self._run("whole")

    def interrupted(self, ends: int, name: str) -> tuple[Path, int]:
        """A run that is ended at most so often, then left to finish; how often it was."""
        start = (str(self.plans[0]), "--run-dir", self._at(name))
        count = resumed = 0
        while True:
            run = self._run(name)
            where = start
            if run.exists():
                resumed += 1
                plan = self.plans[resumed % len(self.plans)]
                where = (str(plan), "--resume", str(run))
            with self._launch(*where) as process:
                ended = self._end(process, name) if count < ends else None
                code, text = self._wait(process)
            count += ended is not None
            if code == 0:
                return self._run(name), count
            assert ended, f"a launch that nobody ended failed with {code}:\n{text}"
            assert "Traceback" not in text, text
            assert ended != "interrupt" or code == INTERRUPTED, (code, text)
            self._tell(
                f"{count}: exit code {code}, newest checkpoint {newest_step(self._run(name))}"
            )

    @contextlib.contextmanager
    def _launch(self, *where: str) -> Iterator[subprocess.Popen[str]]:
        """A launch that is over after the block, whatever happens there."""
        options = ["--steps", str(self.steps), "--checkpoint-every", str(self.every)]
        options += ["--max-restarts", "0"]  # what is looked at is a launch that ends
        paths = os.pathsep.join(filter(None, sys.path))
        with (self.folder / "out.txt").open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", self.before + COMMAND, "launch", *where, *options],
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _wait(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        code = process.wait(PATIENCE)
        return code, (self.folder / "out.txt").read_text()

    def _end(self, process: subprocess.Popen[str], name: str) -> End | None:
        """Wait for a random moment and end the launch: how, None where it was done before."""
        recorded = len(self._metrics(name))
        more = self.draw.randint(1, 3 * self.every)
        early, how = self.draw.random() < EARLY, self.draw.choice(self.ends)
        limit = time.monotonic() + (self.draw.uniform(0, EARLY_SECONDS) if early else PATIENCE)
        while process.poll() is None and time.monotonic() < limit:
            if not early and len(self._metrics(name)) not in range(recorded + more):
                break
            time.sleep(0.02)
        time.sleep(self.draw.uniform(0, LATE_SECONDS))
        if process.poll() is not None:
            return None
        self._tell(f"ending the {how}, {len(self._metrics(name))} steps on record")
        victims = {"launch": [process.pid], "interrupt": [process.pid]}
        for pid in victims.get(how) or list(workers(self._run(name)))[:1] or [process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT if how == "interrupt" else signal.SIGKILL)
        return how

    def _at(self, name: str) -> str:
        return str(self.folder / name)

    def _run(self, name: str) -> Path:
        """The only run there."""
        found = sorted((self.folder / name).glob("*/plan.yaml"))
        return found[0].parent if found else self.folder / name / "none"

    def _metrics(self, name: str) -> tuple[Metric, ...]:
        return read_metrics(self._run(name))

    def _tell(self, text: str) -> None:
        self.told.append(text)
        print(text, flush=True)


def workers(run: Path) -> Iterator[int]:
    """The processes that hold a rank of the run."""
    for links in Path("/proc").glob("[0-9]*/fd"):
        try:
            held = any(
                ".lock-rank-" in str(f.readlink()) and f.readlink().is_relative_to(run)
                for f in links.iterdir()
            )
        except OSError:  # ended, or another user's
            continue
        if held:
            yield int(links.parent.name)


def differences(whole: Path, ended: Path) -> list[str]:
    """Where two runs' curves differ: steps that are not there once, losses, and the weights."""
    first, second = read_record(whole), read_record(ended)
    found = []
    steps = [metric.step for metric in second.metrics]
    if steps != [metric.step for metric in first.metrics]:
        found.append(f"steps on record: {steps}")
    for before, after in zip(first.metrics, second.metrics, strict=False):
        for name in ("loss", "gradient_norm", "learning_rate", "loss_scale", "skipped"):
            old, new = getattr(before, name), getattr(after, name)
            if old != new:
                found.append(f"step {before.step}: {name} {old!r} and {new!r}")
    if first.summary.digest != second.summary.digest:
        found.append(f"weights {first.summary.digest} and {second.summary.digest}")
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", nargs="+", type=Path, help="plans; resumptions take them in turn")
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for the runs")
    parser.add_argument("--ends", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint-every", type=int, default=4)
    parser.add_argument("--how", default=",".join(ENDS), help="of: " + ", ".join(ENDS))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    draw = random.Random(given.seed)
    ends = [end for end in ENDS if end in given.how.split(",")]
    soak = Soak(given.plans, given.folder, given.steps, given.checkpoint_every, draw, ends)
    whole, done, number, wrong = soak.uninterrupted(), 0, 0, 0
    while done < given.ends:
        number += 1
        run, times = soak.interrupted(given.ends - done, f"ended-{number}")
        done += times
        found = differences(whole, run)
        wrong += bool(found)
        print(f"run {number}: ended {times} times; {'; '.join(found[:5]) or 'equal'}", flush=True)
    print(f"{done} ends in {number} runs of {given.steps} steps: {wrong} runs differ")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
