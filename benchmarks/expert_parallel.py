"""Experts spread over GPUs beside ZeRO, in steps of a model like Qwen3-MoE: measured and promised.

    python -m benchmarks.expert_parallel OUT [PART ...]

Parts: `two` and `four` (`bigplan launch` on so many GPUs, where there are so many, with the plan's
promises beside: ZeRO 2 and 3 without ep, ep over all GPUs with ZeRO 0 and 2, and of four over two
with ZeRO 1 and 2; a start is of the same weights and tokens, so first losses must agree) and
`profile` (what a step of the fastest run with ep has on rank 0: kernels by their kind, and the
GPU's idle time; OUT gets the trace). OUT gets cluster-N.yaml, expert-parallel.json, which keeps
what earlier calls found, and the runs. About a minute a run by estimate: four, six and two of them.
Without a GPU: small shapes on CPU processes, to see that everything runs; its figures mean nothing.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.parts import CUDA, Trained, beside_promises, seen
from bigplan.plan import Plan
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.model import ModelSpec

GPUS = torch.cuda.device_count() if CUDA else 4
LENGTH, SEQUENCES = (2048, 8) if CUDA else (32, 2)  # of a rank and step
STEPS = 8 if CUDA else 3
PARTS = {"two": 2, "four": 4, "profile": 0}  # ranks
SMALL = {"hidden": 64, "ffn": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 256}
# 4.0 B parameters, of which a token passes 0.9 B: with ZeRO 0 and ep 2 a GPU has 2.3 B of them.
MODEL = ModelSpec.model_validate(
    {
        "name": "qwen3-like-4b",
        "layers": 12,
        "hidden": 2048,
        "ffn": 768,
        "heads": 32,
        "kv_heads": 4,
        "head_dim": 128,
        "qk_norm": True,
        "experts": 64,
        "experts_per_token": 8,
        "router_loss": 0.001,
        "vocab": 32000,
        "max_sequence_length": 4096,
        "source": "Qwen3-30B-A3B's block with half of its experts, made up for this measurement",
    }
    | ({} if CUDA else SMALL | {"layers": 2, "experts": 8, "experts_per_token": 2})
)
# Kinds of kernels by what their names have, the first that fits.
KINDS = {
    "exchanges": ("SendRecv", "AllToAll"),
    "other collectives": ("nccl",),
    "grouped products": ("GroupProblem", "grouped", "Grouped"),
    "attention": ("fmha", "flash", "cudnn"),
    "products": ("gemm", "cutlass", "nvjet", "xmma"),
    "rows": ("_sent", "_combined", "_weighted", "_put"),
    "copies": ("Memcpy", "Memset"),
}
# What a launch gives its workers before they import torch.
LAUNCHED = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "GLOO_SOCKET_IFNAME": "lo",
}
Settings = Mapping[str, int]


def settings_of(ranks: int) -> Iterator[Settings]:
    """The decisions of runs; all others are the planner's."""
    for zero in (2, 3):
        yield {"dp": ranks, "zero": zero, "ep": 1}
    for ep in sorted({2, ranks}):
        for zero in (0, 2) if ep == ranks else (1, 2):
            yield {"dp": ranks, "zero": zero, "ep": ep}


def steps(out: Path, ranks: int, pins: Settings) -> dict[str, Any]:
    """A launch's seconds a step and bytes, beside its promises."""
    trained = Trained(out, MODEL, LENGTH, SEQUENCES, STEPS)
    record, plan = trained.launched(ranks, pins), f"{trained.name(ranks, pins)}.plan"
    (out / plan).write_bytes(pickle.dumps(record.plan))
    return {"ranks": ranks, "pins": dict(pins), **beside_promises(record), "plan": plan}


def profiled(out: Path, plan: str) -> dict[str, float]:
    """Milliseconds of the kernels of a step on rank 0, by kind, and of the step."""
    ranks = pickle.loads((out / plan).read_bytes()).strategy.ranks  # our own file
    command = "import sys; from benchmarks.expert_parallel import step_of; step_of(*sys.argv[1:])"
    with tempfile.TemporaryDirectory() as scratch:
        every = []
        for rank in range(ranks):
            given = [sys.executable, "-c", command, str(rank), str(out / plan), scratch]
            where = {"CUDA_VISIBLE_DEVICES": seen()[rank]} if CUDA else {}
            every.append(subprocess.Popen(given, env=os.environ | LAUNCHED | where))
        ended = [process.wait() for process in every]
    if any(ended):
        sys.exit(f"profile of {plan}: processes ended with {ended}")
    found: dict[str, float] = json.loads((out / f"{plan}.json").read_text())
    return found


def step_of(rank: str, path: str, scratch: str) -> None:
    """One process: three steps, and one that is looked at."""
    plan: Plan = pickle.loads(Path(path).read_bytes())  # our own file
    own = Path(scratch) / rank
    own.mkdir()
    worker = NativeWorker(plan, int(rank), own)
    try:
        worker.preflight()
        worker.start(Path(scratch) / "meeting")
        for _ in range(3):
            worker.step()
        activities = [ProfilerActivity.CUDA] if CUDA else [ProfilerActivity.CPU]
        with profile(activities=activities) as looked:
            seconds = worker.step().seconds
        if rank == "0":
            looked.export_chrome_trace(f"{path}.trace.json.gz")
            # Of a CPU's step kernels are no events of their own.
            told = _told(looked.events() if CUDA else ()) | {"step": 1e3 * seconds}
            Path(f"{path}.json").write_text(json.dumps(told))
        worker.finish()
    finally:
        worker.close()


def _told(events: Iterable[Any]) -> dict[str, float]:
    """Milliseconds of kernels by kind, and where no kernel ran between the first and the last."""
    by_kind, spans = defaultdict[str, float](float), list[tuple[float, float]]()
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA:  # each event makes one of its own
            continue
        span = event.time_range
        spans.append((span.start, span.end))
        kind = next((k for k, parts in KINDS.items() if any(p in event.name for p in parts)), "")
        by_kind[kind or "others"] += (span.end - span.start) / 1e3
    idle, end = 0.0, min((start for start, _ in spans), default=0.0)
    for start, stop in sorted(spans):
        idle, end = idle + max(0.0, start - end), max(end, stop)
    return dict(by_kind) | {"idle": idle / 1e3}


def main() -> None:
    """All parts, or those that are named; what was found before stays in the file."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    out, parts = Path(sys.argv[1]).resolve(), sys.argv[2:] or [*PARTS]
    out.mkdir(parents=True, exist_ok=True)
    results = out / "expert-parallel.json"
    name = torch.cuda.get_device_name() if CUDA else "no GPU: small, no times"
    print(f"torch {torch.__version__}, {GPUS} x {name}; seconds a step (promised)", flush=True)
    found = json.loads(results.read_text()) if results.exists() else {}
    for ranks in filter(None, (PARTS[part] for part in parts)):
        for pins in settings_of(ranks) if ranks <= GPUS else ():
            one = steps(out, ranks, pins)
            found[one["plan"]] = one | {"device": name, "torch": torch.__version__}
            results.write_text(json.dumps(found, indent=1) + "\n")
            told = f"{one['seconds']:.3f} ({one['promised']:.3f}), losses {one['losses'][:2]}"
            print(f"  {ranks} ranks {dict(pins)}: {told}, {one['memory']}", flush=True)
    if "profile" in parts:
        spread = [one for one in found.values() if one["pins"]["ep"] > 1]
        for ranks in sorted({one["ranks"] for one in spread}):
            best = min((o for o in spread if o["ranks"] == ranks), key=lambda o: o["seconds"])
            best["profile"] = profiled(out, best["plan"])
            results.write_text(json.dumps(found, indent=1) + "\n")
            print(f"  {best['plan']}: {best['profile']}", flush=True)


if __name__ == "__main__":
    main()
