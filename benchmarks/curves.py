"""Losses of a byte model of 300 M parameters that learns the bundled book, for scripts beside this.

Without a GPU a tiny model takes its place.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.parts import CUDA, bigplan, newest
from bigplan.spec.catalog import find_model
from bigplan.spec.files.dump import to_yaml

LAST = 20  # steps whose mean loss is told
SMALL = {"name": "bytes-300m", "layers": 24, "hidden": 1024, "ffn": 2816, "heads": 16}
SMALL |= {"kv_heads": 16, "head_dim": 64, "vocab": 256, "max_sequence_length": 512}
TINY = {"name": "tiny", "layers": 2, "hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2}
TINY |= {"head_dim": 16, "vocab": 256}


def curve(out: Path, name: str, steps: int, *options: str) -> dict[str, Any]:
    """Of a launch with these options, by OUT/cluster.yaml: losses, the last ones' mean, seconds."""
    model, runs = out / "small.yaml", out / f"curve-{name}"
    fields = find_model("llama-like-3.3b").model_dump() | (SMALL if CUDA else TINY)
    model.write_text(to_yaml(fields))
    length, batch, number = ("512", "32", steps) if CUDA else ("64", "4", 30)
    bigplan(
        *("launch", "--model", str(model), "--cluster", str(out / "cluster.yaml")),
        *("--seq-len", length, "--global-batch", batch, "--steps", str(number)),
        *("--warmup-steps", "20", "--precision", "bf16", "--engine", "native"),
        *("--checkpoint-keep", "0", *options, "--run-dir", str(runs)),
    )
    record = newest(runs.iterdir())
    losses = [metric.loss for metric in record.metrics]
    seconds = median(metric.seconds for metric in record.metrics[2:])
    return {"last": mean(losses[-LAST:]), "seconds": seconds, "losses": losses}
