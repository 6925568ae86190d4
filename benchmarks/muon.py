"""Muon: its directions and whole steps beside their prices, and losses beside AdamW's.

    python -m benchmarks.muon OUT [PART ...]

Parts: `directions` (milliseconds of the iteration for the matrices of a block of Llama 3 8B and of
a block of 128 narrow experts, priced and measured, with the GPU's memory that it takes beside the
reserved), `steps` (llama-like-3.3b on one GPU by AdamW and by Muon, all on the GPU and with it held
to 24 GiB: each plan beside what it takes) and `curves` (300 steps of a byte model of 300 M
parameters that learns the bundled book, by both). Promises are of OUT/cluster.yaml, which is
profiled (--quick, a minute) where it is not there; `directions` alone, some seconds, are then
priced for the shipped h200-1x. OUT gets muon.json.
Without a GPU all take small shapes, to see that everything runs; their figures mean nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.curves import curve
from benchmarks.moments import tiny
from benchmarks.parts import bigplan
from bigplan.cost.compute import operator_seconds
from bigplan.cost.framework import NATIVE
from bigplan.cost.price import device_of
from bigplan.graph.graph import Tensor
from bigplan.graph.muon import products
from bigplan.plan import load_plan
from bigplan.runtime.optimizer.muon import orthogonalised
from bigplan.spec.catalog import find_cluster
from bigplan.spec.training import Training

CUDA = torch.cuda.is_available()
STEPS, REPEATS = 5, 7
BLOCKS = {
    "q_proj, o_proj": Tensor("q", 4096, 4096),
    "k_proj, v_proj": Tensor("k", 1024, 4096),
    "gate_proj, up_proj": Tensor("gate", 14336, 4096),
    "down_proj": Tensor("down", 4096, 14336),
    "128 experts, gate": Tensor("e", 768, 128 * 2048, experts=128),
}
SMALL_BLOCKS = {
    "q_proj": Tensor("q", 64, 64),
    "gate_proj": Tensor("gate", 128, 64),
    "4 experts, gate": Tensor("e", 16, 4 * 64, experts=4),
}
CASES = {"resident": (), "24 GiB": ("--cap", "gpu=24 GiB")}
RATES = {"adamw": "3e-4", "muon": "3e-4"}
PARTS = ("steps", "directions", "curves")  # steps first: what this process takes they lack


def directions(out: Path) -> dict[str, Any]:
    """Milliseconds of each tensor, the median of some, and those of its products' prices."""
    profiled = out / "cluster.yaml"
    nodes = find_cluster(str(profiled) if profiled.exists() else "h200-1x").group
    device = device_of(nodes, Training(sequence_length=1, global_batch=1), NATIVE)
    found: dict[str, Any] = {}
    for name, tensor in (BLOCKS if CUDA else SMALL_BLOCKS).items():
        given = torch.randn(tensor.elements, dtype=torch.bfloat16, device="cuda" if CUDA else "cpu")
        priced = sum(operator_seconds(each, device) for each in products((tensor,), STEPS))
        flops = sum(getattr(each, "flops", 0.0) for each in products((tensor,), STEPS))
        took = _seconds(lambda g=given, t=tensor: orthogonalised(g.clone(), t, STEPS))
        found[name] = {
            "measured ms": 1e3 * took,
            "priced ms": 1e3 * priced,
            "TFLOP/s": flops / took / 1e12,
        }
        if CUDA:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            orthogonalised(given, tensor, STEPS)
            found[name]["MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return found


def _seconds(work: Callable[[], object]) -> float:
    """The median of some runs, after two that are not counted."""
    took = []
    for _ in range(REPEATS + 2):
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if CUDA:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return median(took[2:])


def steps(out: Path) -> dict[str, Any]:
    """Every case by both optimizers: promised and measured, each in a process of its own."""
    found: dict[str, Any] = {}
    for case, held in CASES.items():
        for name, rate in RATES.items():
            plan = out / f"{case.replace(' ', '-')}-{name}.plan.yaml"
            what = ("--model", "llama-like-3.3b", "--seq-len", "4096", "--global-batch", "16")
            bigplan(
                *("plan", "--cluster", str(out / "cluster.yaml"), *(held if CUDA else ())),
                *(what if CUDA else tiny(out)),
                *("--precision", "bf16", "--engine", "native", "--optimizer", name),
                *("--learning-rate", rate, "--out", str(plan)),
            )
            command = (sys.executable, "-m", "benchmarks.moments", "--one", str(plan), "4")
            subprocess.run(command, check=True)
            promised = load_plan(plan).predicted
            record = json.loads(plan.with_suffix(".json").read_text())
            found[f"{case}, {name}"] = {
                "seconds": median(record["seconds"][1:]),
                "promised": promised.step_seconds,
                "every": record["seconds"],
                "losses": record["losses"],
                "memory": record["memory"],
                "optimizer promised": promised.parts.update,
            }
            took = found[f"{case}, {name}"]["seconds"]
            print(f"{case}, {name}: {took:.2f} s, promised {promised.step_seconds:.2f}", flush=True)
    return found


def curves(out: Path) -> dict[str, Any]:
    """Losses of a small model by each optimizer, and the mean of the last ones."""
    return {
        name: curve(out, name, 300, "--optimizer", name, "--learning-rate", rate)
        for name, rate in RATES.items()
    }


def main() -> None:
    """All parts, or those that are named."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    out, parts = Path(sys.argv[1]).resolve(), sys.argv[2:] or PARTS
    out.mkdir(parents=True, exist_ok=True)
    cluster = out / "cluster.yaml"
    if not cluster.exists() and {*parts} & {"steps", "curves"}:
        how = ("profile", "--quick", "--nvme") if CUDA else ("detect", "--folder")
        bigplan(*how, str(out), "--out", str(cluster))
    results = out / "muon.json"
    found = json.loads(results.read_text()) if results.exists() else {}
    run: dict[str, Callable[[Path], dict[str, Any]]] = {
        "directions": directions,
        "steps": steps,
        "curves": curves,
    }
    for part in parts:
        found[part] = run[part](out)
        print(part, json.dumps(found[part], indent=1), flush=True)
        results.write_text(json.dumps(found, indent=1) + "\n")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if CUDA else 'no GPU'}")


if __name__ == "__main__":
    main()
