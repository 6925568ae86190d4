"""Runs peers one after the other, each in a process of its own, and keeps what they say.

    python -m benchmarks.peers.run OUT [CASE ...] [--minutes 9.5] [--file cases.yaml]

Cases are given by name, or several by how their names begin; none given are all. A case that takes
longer than its minutes, or than what --minutes leaves, is ended and recorded; so is one that the
kernel kills for memory, which it is told to prefer to all others. OUT/peers.json holds a record for
every case, those of earlier runs too, and OUT/peers.log all that they print.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from bigplan.errors import BigplanError
from bigplan.spec.files.document import Spec, load_document

HERE = Path(__file__).parent
SCRATCH = Path(tempfile.gettempdir()) / "bigplan-peers"
TOLD = ("prepared in ", "lap ", "step ")  # how lines begin that a peer prints as it goes
POLL = 0.25  # seconds between looks at the process and at the host's memory


class Case(Spec):
    """One process."""

    module: str
    """below benchmarks/"""
    arguments: str
    """NVME in it is a folder for this case alone"""
    minutes: float = Field(gt=0)


class Cases(Spec):
    """A file of them."""

    cases: dict[str, Case]


class End(NamedTuple):
    """How a process ended."""

    code: int
    late: bool
    """ended by us, after its time"""
    host_bytes: int
    """the most that it took of the host's available memory, anybody else's use included"""


def environment() -> dict[str, str]:
    """What every case runs in; what is set already stays."""
    ours = {
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONUNBUFFERED": "1",
        "TORCH_EXTENSIONS_DIR": str(SCRATCH / "extensions"),
        "MAX_JOBS": str(os.cpu_count()),
    }
    return ours | dict(os.environ)


def available() -> int:
    """Bytes of host memory that a process could take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {key: int(rest.split()[0]) for key, rest in (line.split(":") for line in lines)}
    return sizes["MemAvailable"] * 1024


def watch(command: list[str], log: Path, seconds: float) -> End:
    """Run a process with all that it starts, for at most so long."""
    before = lowest = available()
    late = False
    with log.open("a") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,  # in our session, so that it ends with it
            env=environment(),
            cwd=HERE.parents[1],
        )
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        end = time.monotonic() + seconds
        try:
            while process.poll() is None and not late:
                time.sleep(POLL)
                lowest = min(lowest, available())
                late = time.monotonic() > end
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    return End(code, late, before - lowest)


def run(case: Case, log: Path, seconds: float) -> dict[str, Any]:
    """The record of one case: what it printed of itself, and how it ended."""
    drive = SCRATCH / "nvme"
    shutil.rmtree(drive, ignore_errors=True)
    drive.mkdir(parents=True)
    command = [sys.executable, "-m", f"benchmarks.{case.module}"]
    command += [str(drive) if word == "NVME" else word for word in shlex.split(case.arguments)]
    begun, start = log.stat().st_size, time.monotonic()
    end = watch(command, log, seconds)
    shutil.rmtree(drive)
    with log.open("rb") as text:
        text.seek(begun)
        said = text.read().decode(errors="replace").splitlines()
    told = [line for line in said if line.startswith('{"peer"')]
    record: dict[str, Any] = json.loads(told[-1]) if told else {}
    record |= {
        "command": shlex.join(["python", *command[1:]]),
        "wall_seconds": time.monotonic() - start,
        "return_code": end.code,
        "host_peak_taken_bytes": end.host_bytes,
    }
    if end.code and "error" not in record:
        record["error"] = why(end, seconds)
        record["steps_seen"] = [line for line in said if line.startswith(TOLD)]
    return record


def why(end: End, seconds: float) -> str:
    """In words, where the process could not say so itself."""
    if end.late:
        return f"not done after {seconds:.0f} s"
    if end.code == -signal.SIGKILL:
        return "killed, as the kernel does where host memory is used up"
    if end.code < 0:
        return f"ended by {signal.Signals(-end.code).name}"
    return f"exit code {end.code}; the log says more"


def tell(name: str, record: dict[str, Any]) -> None:
    """One line for the reader."""
    if "error" in record:
        print(f"{name}: {record['error']} ({record['wall_seconds']:.0f} s)", flush=True)
        return
    told = [f"{record['wall_seconds']:.0f} s in all"]
    if "median_seconds" in record:
        told.insert(0, f"{record['median_seconds']:.3f} s a step")
        told.insert(1, f"{record['tokens_per_second']:.0f} tokens/s")
    if "gpu_peak_allocated_bytes" in record:
        told.append(f"GPU {record['gpu_peak_allocated_bytes'] / 2**30:.1f} GiB")
    told.append(f"host {record['host_peak_taken_bytes'] / 2**30:.1f} GiB")
    print(f"{name}: {', '.join(told)}", flush=True)


def picked(cases: dict[str, Case], names: list[str]) -> dict[str, Case]:
    """Those of these names, in the file's order; a name that no case has picks by beginnings."""
    exact = {name for name in names if name in cases}
    beginnings = tuple(name for name in names if name not in cases)
    return {
        name: case
        for name, case in cases.items()
        if not names or name in exact or name.startswith(beginnings)
    }


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="CASE")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all together")
    parser.add_argument("--file", type=Path, default=HERE / "cases.yaml")
    args = parser.parse_args()
    try:
        cases = load_document(args.file, Cases).cases
    except BigplanError as error:
        parser.error(str(error))
    for name in args.names:
        if not picked(cases, [name]):
            parser.error(f"no case begins with {name!r}; there are {', '.join(cases)}")
    args.out.mkdir(parents=True, exist_ok=True)
    path, log = args.out / "peers.json", args.out / "peers.log"
    records: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for lock in SCRATCH.glob("extensions/*/lock"):
        lock.unlink()  # of a build that was killed; the next would wait for it
    end = time.monotonic() + args.minutes * 60
    for name, case in picked(cases, args.names).items():
        left = end - time.monotonic()
        if left < POLL:
            print(f"{name}: not started, the {args.minutes:g} minutes are over", flush=True)
            continue
        with log.open("a") as text:
            text.write(f"== {name}: benchmarks.{case.module} {case.arguments}\n")
        records[name] = run(case, log, min(left, case.minutes * 60))
        path.write_text(json.dumps(records, indent=1))
        tell(name, records[name])


if __name__ == "__main__":
    main()
