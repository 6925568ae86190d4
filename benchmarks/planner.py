"""What the search finds for cases from one GPU to 10,240, and the CPU time that it takes.

Usage: python -m benchmarks.planner [CASE ...] > planner.txt    (two minutes on two cores)

A line per case: simulated seconds of a step, the mean over what a CPU reaches of its rate, how far
the step is above its bound, plans simulated, CPU seconds of the search, and the plan. Those of
SLOW_CASES, with 10 Gb/s Ethernet between nodes, are only searched where they are named.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from bigplan.planner import Request
from bigplan.solve.candidate import Workload
from bigplan.solve.pins import parse_pins
from bigplan.solve.search import Scope, search
from bigplan.solve.simplicity import mechanisms
from bigplan.spec.experiment import make_experiment

Case = dict[str, Any]


def _case(model: str, cluster: str, batch: int, length: int = 4096, **more: Any) -> Case:
    sizes = {"training.global_batch": batch, "training.sequence_length": length}
    return {"model": model, "cluster": cluster, **sizes, **more}


FP16 = {"training.precision": "fp16"}
DESK = "rtx-4090-workstation"
CASES: dict[str, Case] = {
    "8b-4090": _case("llama-3-8b", DESK, 16),
    "8b-4090-default": {"model": "llama-3-8b", "cluster": DESK},
    "8b-4090-host64": _case("llama-3-8b", DESK, 4, 8192, **{"caps.host": "64GiB"}),
    "13b-4090": _case("llama-2-13b", DESK, 16),
    "70b-4090": _case("llama-3-70b", DESK, 16),
    "5.5b-h200-24": _case("llama-like-5.5b", "h200-1x", 8, **{"caps.gpu": "24GiB"}),
    "8b-h200-65k": _case("llama-3-8b", "h200-1x", 4, 65536, **{"caps.gpu": "24GiB"}),
    "13b-h200": _case("llama-2-13b", "h200-1x", 16),
    "opt13b-t4": _case("opt-13b", "t4-cloud", 16, 2048, **FP16),
    "7b-3090x4": _case("qwen2.5-7b", "rtx-3090x4-workstation", 64),
    "8b-h100": _case("llama-3-8b", "dgx-h100", 64, nodes=1),
    "70b-h100-1": _case("llama-3-70b", "dgx-h100", 128, nodes=1),
    "70b-h100-4": {"model": "llama-3-70b", "cluster": "dgx-h100", "nodes": 4},
    "13b-v100-7": _case("llama-2-13b", "v100-4x", 64, nodes=7, **FP16),
    "175b-a100": _case("gpt3-175b", "dgx-a100-80g", 64, 2048, nodes=8),
    "1t-10240": {"model": "megatron-1t", "cluster": "dgx-h100", "nodes": 1280},
}
SLOW = {"hardware.inter_node": "ethernet-10g"}
SLOW_CASES: dict[str, Case] = {
    "8b-h100-slow": {"model": "llama-3-8b", "cluster": "dgx-h100", "nodes": 4, **SLOW},
    "mixtral-slow": {"model": "mixtral-8x7b", "cluster": "dgx-a100-80g", "nodes": 4, **SLOW},
    "70b-h200-slow": {"model": "llama-3-70b", "cluster": "hgx-h200", "nodes": 8, **SLOW},
    "405b-h200-slow": {"model": "llama-3-405b", "cluster": "hgx-h200", "nodes": 32, **SLOW},
}


def line(name: str) -> str:
    """The case, planned."""
    request = Request.of(make_experiment((CASES | SLOW_CASES)[name]))
    fixed, pins = parse_pins(request.settings)
    workload = Workload(request.model, request.training, request.cluster.group)
    start = time.process_time()
    found = search(workload, Scope(fixed, pins))
    took = time.process_time() - start
    best = found.best
    used = ",".join(sorted(mechanisms(best.placement))) or "-"
    strategy = " ".join(f"{k}={v}" for k, v in best.candidate.strategy if v not in (0, 1, ()))
    return (
        f"{name:16s} {best.seconds:10.4f} {best.expected:10.4f} "
        f"{best.seconds / found.bound - 1:6.1%} {found.programs:5d} {took:6.2f}  "
        f"{strategy or '-'}; {used}"
    )


def main() -> None:
    """A line per case."""
    columns = f"{'step s':>10s} {'mean s':>10s} {'gap':>6s} {'plans':>5s} {'CPU s':>6s}"
    print(f"{'case':16s} {columns}  plan")
    for name in sys.argv[1:] or CASES:
        print(line(name), flush=True)


if __name__ == "__main__":
    main()
