"""AdamW's moments in fp32, bf16 and 8 bits: updates alone, and steps whose state leaves the GPU.

    python -m benchmarks.moments OUT [PART ...]

Parts: `host` (G parameters/s of compiled updates by threads, in a core's caches and in memory, on
any machine), `kernel` (the same of the GPU's kernels, and GB/s by the bytes that they move),
`steps` (llama-like-5.5b with the GPU held to 24 GiB and all its state in host memory,
llama-like-3.3b with all its state on a drive; each moments' plan beside what it takes) and `curves`
(losses of a byte model of 300 M parameters that learns the bundled book). A plan's promises are of
OUT/cluster.yaml, which is profiled (--quick, a minute) where it is not there. OUT gets
moments.json.
All but `curves`, which takes about four minutes more, are about seven on an H200 by estimate.
Without a GPU all but `host` take small shapes, to see that everything runs; their figures mean
nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.curves import TINY, curve
from benchmarks.parts import bigplan
from bigplan.plan import load_plan
from bigplan.runtime.cpu.native import Piece, native
from bigplan.runtime.memory.moments import StoredState, bytes_view
from bigplan.runtime.optimizer.adamw import adamw_kernel
from bigplan.runtime.optimizer.narrow_adamw import NarrowPiece, Run, step_on_cpu
from bigplan.spec.catalog import find_model
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.moments import ELEMENT, Moments, places
from bigplan.spec.optimizer import Optimizer

CUDA = torch.cuda.is_available()
IN_CACHES, IN_MEMORY = 120_000, 64_000_000  # parameters
ON_GPU = 256_000_000 if CUDA else 10_000
REPEATS = 7
# Model, what is held and decided, and steps: the first of them has no update in it.
CASES: dict[str, tuple[str, tuple[str, ...], int]] = {
    "host": ("llama-like-5.5b", ("--cap", "gpu=24 GiB", "--set", "optimizer=host"), 4),
    "drive": ("llama-like-3.3b", ("--set", "optimizer=nvme"), 2),
}
PARTS = ("steps", "host", "kernel", "curves")  # steps first: what this process takes they lack


def _state(moments: Moments, count: int, device: str) -> StoredState:
    stored = torch.zeros(
        places(count, moments, 2, master=True).end, dtype=torch.uint8, device=device
    )
    return StoredState.of(bytes_view(stored), count, Optimizer(moments=moments), master=True)


def _updates(moments: Moments, count: int, threads: int) -> Callable[[], None]:
    """An update of so many parameters on the CPU, gradients divided and a bf16 copy written."""
    library, kernel = native(), adamw_kernel(Optimizer(), 10, 1e-3, 0.1).native
    if library is None:
        sys.exit("no compiled updates on this machine: bigplan doctor says why")
    state, gradient = _state(moments, count, "cpu"), torch.randn(count)
    copy = torch.zeros(count, dtype=torch.bfloat16)
    assert state.master is not None
    if moments == "fp32":
        piece = Piece(state.master, gradient, state.moments, copy)
        return lambda: library.step(kernel, [piece], 2.0, threads)
    narrow = NarrowPiece(state.master, gradient, state.moments, state.scales, copy)
    runs = [Run(0, kernel.constants)]
    return lambda: step_on_cpu(library, narrow, runs, (2.0, 10), threads)


def host() -> dict[str, Any]:
    """G parameters/s, the best of some: others' work only slows it."""
    found: dict[str, Any] = {}
    cores = torch.get_num_threads()
    for moments in ELEMENT:
        rates = {"one core, in its caches": (IN_CACHES, 1)}
        rates |= {f"{n} threads": (IN_MEMORY, n) for n in sorted({1, max(1, cores // 2), cores})}
        found[moments] = {}
        for name, (count, threads) in rates.items():
            work = _updates(moments, count, threads)
            work()
            found[moments][name] = count / min(_seconds(work) for _ in range(REPEATS)) / 1e9
    return found


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def kernel() -> dict[str, Any]:
    """G parameters/s on a GPU, and GB/s of gradients in fp32, state both ways, a bf16 copy."""
    from bigplan.kernels.handwritten import moments as narrow
    from bigplan.kernels.update import AdamW
    from bigplan.runtime.generated import _library

    device, found = "cuda" if CUDA else "cpu", {}
    gradient = torch.randn(ON_GPU, device=device)
    copy = torch.zeros(ON_GPU, dtype=torch.bfloat16, device=device)
    constants = adamw_kernel(Optimizer(), 10, 1e-3, 0.1).native.constants
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    each = torch.tensor([[*constants, 10.0, 2.0]], device=device)
    for moments in ELEMENT:
        if moments == "fp32" and not CUDA:
            continue
        state = _state(moments, ON_GPU, device)
        assert state.master is not None
        pair = state.master, gradient
        if moments == "fp32":
            adamw = AdamW(_library().pricer)
            factors = adamw.factors(constants, 2.0, torch.device(device))
            first, second = state.moments
            took = _milliseconds(
                lambda s=state, k=adamw, f=factors, m=(first, second): k.step(
                    s.master, gradient, m, copy, f
                )
            )
        else:
            took = _milliseconds(
                lambda p=pair, s=state: narrow.step(p, s.moments, s.scales, copy, (starts, each))
            )
        moved = 4 + 2 * places(ON_GPU, moments, 2, master=True).end / ON_GPU + 2
        rate = ON_GPU / took / 1e6
        found[moments] = {"G parameters/s": rate, "GB/s": rate * moved, "bytes": moved}
    return found


def _milliseconds(work: Callable[[], object]) -> float:
    if not CUDA:
        return 1e3 * _seconds(work)  # type: ignore[arg-type]
    import triton

    return float(triton.testing.do_bench(work, warmup=50, rep=200, return_mode="median"))


def steps(out: Path) -> dict[str, Any]:
    """Every case with every moments: promised and measured, each in a process of its own."""
    found: dict[str, Any] = {}
    for case, (model, held, count) in CASES.items():
        for moments in ELEMENT:
            name = f"{case}-{moments}"
            plan = out / f"{name}.plan.yaml"
            what = ("--model", model, "--seq-len", "4096", "--global-batch", "16")
            bigplan(
                *("plan", "--cluster", str(out / "cluster.yaml"), *held),
                *(what if CUDA else tiny(out)),
                *("--precision", "bf16", "--engine", "native", "--moments", moments),
                *("--learning-rate", "3e-5", "--out", str(plan)),
            )
            command = (sys.executable, "-m", "benchmarks.moments", "--one", str(plan), str(count))
            subprocess.run(command, check=True)
            promised = load_plan(plan).predicted
            record = json.loads(plan.with_suffix(".json").read_text())
            measured = median(record["seconds"][1:])
            found[name] = {
                "seconds": measured,
                "promised": promised.step_seconds,
                "every": record["seconds"],
                "losses": record["losses"],
                "busy": {
                    lane: [seconds, record["busy_seconds"].get(lane, 0.0)]
                    for lane, seconds in promised.busy_seconds.items()
                },
                "memory": record["memory"],
                "start": record["start_seconds"],
            }
            print(f"{name}: {measured:.2f} s, promised {promised.step_seconds:.2f}", flush=True)
    return found


def tiny(out: Path) -> tuple[str, ...]:
    """What is planned without a GPU."""
    model = out / "tiny.yaml"
    model.write_text(to_yaml(find_model("llama-like-3.3b").model_dump() | TINY))
    return "--model", str(model), "--seq-len", "64", "--global-batch", "4"


def one(plan: Path, count: int) -> None:
    """Run a plan by its worker alone, and write what its steps took beside it."""
    from benchmarks.limit_run import Amount, trained

    with (
        TemporaryDirectory(dir=plan.parent) as scratch,
        trained(load_plan(plan), Path(scratch), Amount(count)) as (_, record),
    ):
        plan.with_suffix(".json").write_text(json.dumps(record))


def curves(out: Path) -> dict[str, Any]:
    """Losses of a small model, and the mean of its last ones."""
    usual = "--learning-rate", "3e-4", "--beta2", "0.999"
    return {moments: curve(out, moments, 400, *usual, "--moments", moments) for moments in ELEMENT}


def main() -> None:
    """All parts, or those that are named."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--one":
        one(Path(sys.argv[2]), int(sys.argv[3]))
        return
    out, parts = Path(sys.argv[1]).resolve(), sys.argv[2:] or PARTS
    out.mkdir(parents=True, exist_ok=True)
    cluster = out / "cluster.yaml"
    if not cluster.exists() and {*parts} & {"steps", "curves"}:
        how = ("profile", "--quick", "--nvme") if CUDA else ("detect", "--folder")
        bigplan(*how, str(out), "--out", str(cluster))
    results = out / "moments.json"
    found = json.loads(results.read_text()) if results.exists() else {}
    run: dict[str, Callable[[], dict[str, Any]]] = {"host": host, "kernel": kernel}
    run |= {"steps": lambda: steps(out), "curves": lambda: curves(out)}
    for part in parts:
        found[part] = run[part]()
        print(part, json.dumps(found[part], indent=1), flush=True)
        results.write_text(json.dumps(found, indent=1) + "\n")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if CUDA else 'no GPU'}")


if __name__ == "__main__":
    main()
