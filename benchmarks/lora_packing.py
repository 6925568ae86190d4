"""How fast frozen matrices are packed in 4 bits, and how soon a launch takes its first step.

A part of benchmarks/lora.py: weights a second by one core and by all, drawn, in memory and out of
safetensors, by compiled code and by torch's operators, also on a GPU; seconds from a command to its
first step of 8B and 70B in 4 bits, of 8B also out of files.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bigplan.rectangle import all_of
from bigplan.runtime.cpu.cores import Cores
from bigplan.runtime.linear import four_bits
from bigplan.runtime.weights.first_values import rows_to_make, stored_values
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.hf.config import to_hf_config
from bigplan.spec.hf.weights import hf_tensors
from bigplan.spec.lora import stored
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

SHARD = 5 * 10**9  # bytes, as files of models have
FEWER = 4  # times as few matrices are packed by torch, which takes ten times as long


def written(model: ModelSpec, folder: Path, device: str) -> Path:
    """A Hugging Face folder of random weights in bf16."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    config = to_hf_config(model)
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, Tensor]] = [{}]
    filled, places = 0, {}
    for tensor in hf_tensors(config["model_type"], model):
        value = torch.randn(tensor.shape, device=device, dtype=torch.bfloat16).mul_(0.02).cpu()
        if filled + value.nbytes > SHARD:
            save_file(shards[-1], folder / f"model-{len(shards)}.safetensors")
            shards[-1].clear()
            shards.append({})
            filled = 0
        shards[-1][tensor.name] = value
        places[tensor.name] = f"model-{len(shards)}.safetensors"
        filled += value.nbytes
    save_file(shards[-1], folder / f"model-{len(shards)}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def _jobs(model: ModelSpec, training: Training) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Parts of all blocks' matrices as a start makes them, with the weights in each."""
    values, own = stored_values(model, training), {p.name: p for p in model.kinds()["block"]}
    for layer in range(1, model.layers + 1):
        for parameter in stored(model, "block", training.lora, 2):
            wide = own[parameter.name]
            if wide.shape != parameter.shape:
                for part in all_of(parameter).bands(rows_to_make(wide, training)):
                    weights = part.rows * wide.matrix[1]
                    yield weights, partial(values, "block", layer, parameter, part)


def _rate(jobs: list[tuple[int, Callable[[], Any]]], threads: int) -> float:
    """Weights a second of the second time that all run."""
    torch.set_num_threads(threads)
    with Cores() as cores:
        for _ in range(2):
            start = time.perf_counter()
            cores.run(partial(_dropped, job) for _, job in jobs)
            seconds = time.perf_counter() - start
    return sum(weights for weights, _ in jobs) / seconds


def _dropped(job: Callable[[], Any]) -> None:
    job()


def rates(model: ModelSpec, weights: Path, device: str) -> dict[str, Any]:
    """Weights a second of one block from each source, by number of threads."""
    usual = torch.get_num_threads()

    def training(**given: Any) -> Training:
        lora = {"rank": 8, "frozen": "nf4"}
        return Training.model_validate(
            {"sequence_length": 64, "global_batch": 1, "precision": "bf16", "lora": lora} | given
        )

    drawn = list(_jobs(model, training()))
    sources = {
        "drawn and packed": drawn,
        "out of files and packed": list(_jobs(model, training(weights=str(weights)))),
    }
    matrix = torch.randn(256, 4096) * 0.02
    alone = (matrix.numel(), partial(four_bits.packed, matrix, torch.bfloat16))
    sources["packed alone"] = [alone] * len(drawn)
    found: dict[str, Any] = {}
    for name, jobs in sources.items():
        found[name] = {threads: _rate(jobs, threads) for threads in sorted({1, usual})}
    compiled, four_bits.native = four_bits.native, lambda: None
    try:
        few = len(drawn) // FEWER
        for name in ("drawn and packed", "packed alone"):
            jobs = sources[name][:few]
            found[f"{name}, by torch"] = {n: _rate(jobs, n) for n in sorted({1, usual})}
    finally:
        four_bits.native = compiled
    torch.set_num_threads(usual)
    if device == "cuda":
        found["packed alone, by torch on the GPU"] = _on_gpu(matrix)
    return found


def _on_gpu(matrix: Tensor) -> float:
    import triton

    wide = matrix.to("cuda").repeat(16, 1)
    work = partial(four_bits.packed, wide, torch.bfloat16)
    seconds = triton.testing.do_bench(work, rep=200, return_mode="median") / 1000
    return wide.numel() / seconds


def first_step(given: dict[str, Any], model: ModelSpec, out: Path) -> dict[str, Any]:
    """Seconds from the command to the end of the first step, of which so many were the step's."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / "model.yaml").write_text(to_yaml(model))
    (out / "plan.yaml").write_text(json.dumps(given | {"model": str(out / "model.yaml")}))
    command = "from bigplan.cli import main; main()"
    options = ("--steps", "1", "--checkpoint-keep", "0", "--run-dir", str(out / "runs"))
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", command, "launch", str(out / "plan.yaml"), *options]
    )
    seconds = None
    while process.poll() is None:
        if seconds is None and any(
            path.stat().st_size for path in out.glob("runs/*/metrics.jsonl")
        ):
            seconds = time.perf_counter() - start
        time.sleep(0.05)
    lines = [path.read_text().splitlines() for path in out.glob("runs/*/metrics.jsonl")]
    if process.returncode or not lines or not lines[0]:
        return {"failed": process.returncode}
    step = json.loads(lines[0][0])["seconds"]
    return {"to the end of the first step": seconds, "of which the step": step}


def shown(found: dict[str, Any]) -> Iterator[str]:
    """A line for each rate."""
    for name, rate in found.items():
        if isinstance(rate, dict):
            told = ", ".join(f"{value / 1e9:.3f} by {n}" for n, value in rate.items())
        else:
            told = f"{rate / 1e9:.1f}"
        yield f"{name}: {told} G weights/s"
