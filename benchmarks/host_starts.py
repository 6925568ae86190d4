"""Host memory that a worker's start takes beside its tensors: `python benchmarks/host_starts.py`.

A model with a table of 525 million parameters starts from random values, from a checkpoint and from
safetensors, each in a process of its own, on the CPU. All tensors are touched before the first
weights come, so what the process takes beyond them is the start's own. Anonymous memory is what no
file backs; pages of mapped files are the cache's, which gives them up. 12 GiB of memory and 8 of
disk are needed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

from bigplan.graph.strategy import Strategy
from bigplan.runtime.weights.hf import HfFolder
from bigplan.runtime.worker import NativeWorker
from bigplan.spec.hf.config import from_hf_config
from bigplan.spec.hf.weights import hf_tensors
from bigplan.spec.model import ModelSpec
from bigplan.spec.optimizer import Optimizer
from tests.runtime.plans import placed, plan_of, tiny_training
from tests.toys import kind_placement

GiB = 1 << 30
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 64,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
WAYS = ("random", "checkpoint", "safetensors")


class Peak:
    """The most of this process's memory while the block runs, in bytes, by name in /proc."""

    def __init__(self) -> None:
        self.most = dict.fromkeys(("RssAnon", "RssFile"), 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(0.003):
            self.most = {name: max(most, resident(name)) for name, most in self.most.items()}

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def resident(name: str) -> int:
    """Bytes of this process, as /proc/self/status names them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(fields[1]) << 10 for fields in lines if fields[0] == f"{name}:")


def write_safetensors(folder: Path) -> ModelSpec:
    """A Hugging Face folder of random weights in bf16."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = from_hf_config(CONFIG, "table")
    tensors = {
        tensor.name: torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(0, 0.02)
        for tensor in hf_tensors("llama", model)
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    HfFolder.open(folder, model)
    return model


def start(way: str, folder: Path) -> None:
    """Start once, and print what it took; the start from random values leaves a checkpoint."""
    model = from_hf_config(CONFIG, "table")
    training = tiny_training(
        1,
        precision="bf16",
        gradient_precision="bf16",
        optimizer=Optimizer(name="sgd", learning_rate=1e-3, momentum=0.0),
        weights=str(folder / "hf") if way == "safetensors" else None,
    )
    kinds = {name: kind_placement(1) for name in ("embedding", "block", "head")}
    plan = plan_of(model, training, Strategy(dp=1), placed(**kinds))
    worker = NativeWorker(plan, 0, folder / "scratch", poison=True)
    worker.preflight()
    before = resident("RssAnon")
    with Peak() as peak:
        worker.start(folder / "meeting", folder / "saved" if way == "checkpoint" else None)
    memory = worker._running().context.memory
    placed_bytes = memory.arena.size + memory.slab.size
    beside = peak.most["RssAnon"] - before - placed_bytes
    print(
        f"{way:12} {placed_bytes / GiB:6.2f} GiB of tensors, {beside / GiB:6.3f} beside them at "
        f"most (before the start {before / GiB:.3f}), pages of files "
        f"{peak.most['RssFile'] / GiB:.2f}, {torch.get_num_threads()} threads",
        flush=True,
    )
    if way == "random":
        worker.step()
        worker.save(folder / "saved")
    worker.close()


def main() -> None:
    """All three, one after the other."""
    folder = Path(tempfile.mkdtemp())
    try:
        write_safetensors(folder / "hf")
        for way in WAYS:
            subprocess.run(
                [sys.executable, "-m", "benchmarks.host_starts", way, str(folder)], check=True
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1:]:
        start(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
