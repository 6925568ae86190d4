"""What benchmarks of several parts share: their command line, launches, and the file of figures.

    python -m benchmarks.NAME OUT [PART ...]

OUT gets cluster.yaml, which is detected once, NAME.json with the figures of all parts that were
ever run there, and the runs. Not a benchmark itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bigplan.launcher.record import Record, read_record
from bigplan.spec.catalog import find_cluster
from bigplan.spec.cluster import Cluster
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.model import ModelSpec

CUDA = torch.cuda.is_available()


def gpu() -> str:
    """This machine's GPU; not asked for before it must be, as CUDA starts with the answer."""
    return torch.cuda.get_device_name() if CUDA else "no GPU: small, no times"


def seen() -> list[str]:
    """The GPUs that this process sees."""
    every = range(torch.cuda.device_count())
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, every))).split(",")


def bigplan(*arguments: str, gpus: int = 0) -> None:
    """A command of bigplan, in a process of its own: what it takes of the GPU goes with it.

    `gpus`: on the first so many of those that this process sees; 0: on all.
    """
    where = {"CUDA_VISIBLE_DEVICES": ",".join(seen()[:gpus])} if CUDA and gpus else {}
    command = "from bigplan.cli import main; main()"
    subprocess.run([sys.executable, "-c", command, *arguments], check=True, env=os.environ | where)


def milliseconds(work: Callable[[], object]) -> float:
    """The median."""
    if not CUDA:
        work()
        return 0.0
    import triton

    return float(triton.testing.do_bench(work, warmup=50, rep=200, return_mode="median"))


@dataclass(frozen=True)
class Asked:
    """A folder, and the parts that a command line names."""

    out: Path
    parts: tuple[str, ...]
    name: str

    @classmethod
    def of(cls, usage: str | None, name: str, parts: Iterable[str]) -> Asked:
        """The command line's; without parts all of them. Ends with the usage where it is empty."""
        if len(sys.argv) < 2:
            sys.exit(usage)
        out = Path(sys.argv[1]).resolve()
        out.mkdir(parents=True, exist_ok=True)
        return cls(out, tuple(sys.argv[2:] or parts), name)

    def cluster(self) -> Cluster:
        """This machine as `bigplan detect` has it."""
        path = self.out / "cluster.yaml"
        if not path.exists():
            devices = () if CUDA else ("--cpu-devices", "1")
            bigplan("detect", *devices, "--folder", str(self.out), "--out", str(path))
        return find_cluster(str(path))

    def keep(self, part: str, figures: Mapping[str, Any], **about: Any) -> None:
        """Write a part's figures to the file, beside those found before and what they are of."""
        path = self.out / f"{self.name}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        found[part] = {**figures, "device": gpu(), "torch": torch.__version__, **about}
        path.write_text(json.dumps(found, indent=1) + "\n")


@dataclass(frozen=True)
class Trained:
    """One training of a model that GPUs, or CPU processes, split in several ways."""

    out: Path
    model: ModelSpec
    length: int
    sequences: int  # of a rank and step
    steps: int

    def launched(self, ranks: int, pins: Mapping[str, int], *options: str) -> Record:
        """The record of a launch on so many; what is not pinned is the planner's decision."""
        cluster, model = self.out / f"cluster-{ranks}.yaml", self.out / f"{self.model.name}.yaml"
        runs = self.out / f"runs-{self.name(ranks, pins)}"
        if not cluster.exists():
            devices = () if CUDA else ("--cpu-devices", str(ranks))
            folder = ("--folder", str(self.out), "--out", str(cluster))
            bigplan("detect", *devices, *folder, gpus=ranks)
        model.write_text(to_yaml(self.model))
        bigplan(
            *("launch", "--model", str(model), "--cluster", str(cluster), "--engine", "native"),
            *("--seq-len", str(self.length), "--global-batch", str(self.sequences * ranks)),
            *("--precision", "bf16" if CUDA else "fp32", "--steps", str(self.steps)),
            *("--checkpoint-keep", "0", "--run-dir", str(runs)),
            *(word for key, value in pins.items() for word in ("--set", f"{key}={value}")),
            *options,
            gpus=ranks,
        )
        return newest(runs.glob(f"{self.model.name}-*"))

    def name(self, ranks: int, pins: Mapping[str, int]) -> str:
        """Of such a launch."""
        return "-".join((str(ranks), *(f"{key}{value}" for key, value in pins.items())))


def newest(runs: Iterable[Path]) -> Record:
    """The record of the last of a launch's folders, by name."""
    return read_record(sorted(runs)[-1])


def beside_promises(record: Record) -> dict[str, Any]:
    """A launch's seconds a step and bytes, beside its promises; the first two steps compile."""
    return {
        "seconds": median(metric.seconds for metric in record.metrics[2:] or record.metrics),
        "promised": record.summary.predicted_step_seconds,
        "losses": [metric.loss for metric in record.metrics],
        "norms": [metric.gradient_norm for metric in record.metrics],
        "memory": {row.tier: [row.measured, row.predicted] for row in record.summary.memory},
        "decisions": record.plan.strategy.model_dump(),
    }
