"""Experiments of a tiny model on a small machine: a point is planned in a tenth of a second."""

from pathlib import Path

from bigplan.spec.sweep import Studied, load_study
from tests.tiny import write_cluster

BASE = """\
model: tiny-llama-test
cluster: small.yaml
training: {sequence_length: 32, global_batch: 4, precision: fp32, steps: 3, tokens: 1 M}
engine: native
set: {dp: 2}
"""
# The third cannot be: two devices do not share out three sequences.
SWEEP = "sweep: {grid: {training.global_batch: [2, 4, 3]}}\n"


def study(folder: Path, more: str = SWEEP, base: str = BASE, devices: int = 2) -> Studied:
    """The base and what is added to it, written to a file and read."""
    write_cluster(folder, devices)
    path = folder / "study.yaml"
    path.write_text(base + more)
    return load_study(path)


def unseen(done: int, total: int) -> None:
    """Progress that nobody looks at."""
