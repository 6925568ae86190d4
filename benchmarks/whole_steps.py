"""Whole steps of models whose kernels were measured alone, on one GPU, beside their promises.

    python -m benchmarks.whole_steps OUT [PART ...]

Parts: `qwen3-next` and `qwen3-next-nf4` (four of Qwen3-Next's 48 blocks, of which three have gated
delta rules: all weights trained, and LoRA beside blocks in 4 bits), `qwen3.5` (16 blocks like
Qwen3.5 27B's of half its widths, 1.7 B), `lfm2` (all of LFM2 1.2B), `olmo-hybrid` (eight of OLMo
Hybrid 7B's 32 blocks), `deepseek-nf4` (six of DeepSeek-V2-Lite's 27 blocks, LoRA in 4 bits),
`llama-1b` and `llama-1b-dpo` (all of Llama 3.2 1B, and the same by pairs of responses).
Each runs by the runtime's worker alone; one more step is profiled, and its kernels' milliseconds
are told, longest first. OUT gets whole_steps.json. Half a minute a part on an H100. Without a GPU:
small shapes, to see that everything runs; its figures mean nothing.
"""

from __future__ import annotations

import gc
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.limit_run import measured_steps, recorded, tell
from benchmarks.parts import CUDA, Asked, gpu
from benchmarks.preference import pairs
from bigplan.data.documents import described
from bigplan.engines import make_plan
from bigplan.plan import Plan
from bigplan.planner import Request
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.catalog import find_model
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

LENGTH, STEPS = (4096, 6) if CUDA else (64, 2)
DPO = {"preference": {"method": "dpo"}, "isolate_documents": True, "sequence_length": 4096}
NF4 = {"lora": {"rank": 16, "frozen": "nf4"}}
SMALL: dict[str, Any] = {"hidden": 64, "ffn": 128, "vocab": 256}
TOLD = 30  # kernels


class Case(NamedTuple):
    """A shipped model with other fields, and how it is trained."""

    model: str
    changed: dict[str, Any]
    sequences: int  # a step
    training: dict[str, Any] = {}  # noqa: RUF012  never written

    def spec(self, name: str) -> ModelSpec:
        """Small without a GPU."""
        found = find_model(self.model).model_dump() | self.changed | {"name": name}
        if not CUDA:
            found |= SMALL | {key: 4 for key in ("experts", "experts_per_token") if found[key]}
            found |= {key: 128 for key in ("shared_ffn", "dense_ffn") if found.get(key)}
        return ModelSpec.model_validate(found)


HALF_RULE = {"key_heads": 8, "value_heads": 24, "key_dim": 128, "value_dim": 128, "taps": 4}
HALF = {"layers": 16, "hidden": 2560, "ffn": 8704, "heads": 12, "kv_heads": 2, "vocab": 32000}
CASES = {
    "qwen3-next": Case("qwen3-next-80b-a3b", {"layers": 4}, 8),
    "qwen3-next-nf4": Case("qwen3-next-80b-a3b", {"layers": 4}, 8, NF4),
    "qwen3.5": Case("qwen3.5-27b", HALF | {"delta_rule": HALF_RULE}, 16),
    "lfm2": Case("lfm2-1.2b", {}, 64),
    "olmo-hybrid": Case("olmo-hybrid-7b", {"layers": 8}, 8),
    "deepseek-nf4": Case("deepseek-v2-lite", {"layers": 6}, 8, NF4),
    "llama-1b": Case("llama-3.2-1b", {}, 16),
    "llama-1b-dpo": Case("llama-3.2-1b", {}, 16, DPO),
}


def planned(name: str, asked: Asked) -> Plan:
    """The best plan of a case on this machine."""
    case = CASES[name]
    training = Training.model_validate(
        {
            "sequence_length": LENGTH,
            "global_batch": case.sequences if CUDA else 2,
            "precision": "bf16" if CUDA else "fp32",
        }
        | case.training
    )
    if training.preference is not None:
        data = {"data": str(pairs(asked.out))}
        training = described(Training.model_validate(training.model_dump() | data))
    return make_plan(Request(case.spec(name), training, asked.cluster(), engine="native"))


def kernels_of(worker: NativeWorker) -> dict[str, list[float]]:
    """Milliseconds and launches of each kernel in one step, longest first."""
    activity = ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        worker.step()
    every = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    return {one.key[:90]: [one.self_device_time_total / 1e3, one.count] for one in every[:TOLD]}


def stepped(name: str, asked: Asked) -> dict[str, Any]:
    """Steps of a case beside their promises, and the kernels of one."""
    plan = planned(name, asked)
    promised = plan.predicted.model_dump(mode="json")
    promised["memory"] = {str(use.tier): use.used_bytes for use in plan.predicted.memory}
    print(f"  {plan.strategy}\n  {plan.placement}", flush=True)
    worker = NativeWorker(plan, 0, asked.out)
    worker.preflight()
    worker.start(Path())
    if plan.training.preference is not None:  # which reference it is changes losses, not seconds
        data = worker.pair_data().items()
        worker.refer({part: np.zeros((found.pairs, 2)) for part, found in data})
    try:
        record = recorded(measured_steps(worker, STEPS, float("inf")))
        kernels = kernels_of(worker)
    finally:
        worker.close()
    tell(name, promised, record | {"start_seconds": 0.0})
    for kernel, (ms, count) in kernels.items():
        print(f"    {ms:9.2f} ms {count:5} x {kernel}", flush=True)
    seconds = median(record["seconds"][2:] or record["seconds"])
    return {"seconds": seconds, "promised": promised, "record": record, "kernels": kernels}


def main() -> None:
    """All parts, or those that are named."""
    asked = Asked.of(__doc__, "whole_steps", CASES)
    asked.cluster()
    print(f"torch {torch.__version__}, {gpu()}", flush=True)
    for name in asked.parts:
        print(name, flush=True)
        asked.keep(name, stepped(name, asked))
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
