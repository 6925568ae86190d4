"""What ZeRO-3's hooks of DeepSpeed cost the host, in launches of plain torch's kernels.

    python benchmarks/zero3_hooks.py

Two gloo processes train 12 GPT blocks so narrow that Python takes all the time, recomputed in full:
under ZeRO-1, under ZeRO-3 with no tensor gathered (every one below the persistence threshold), and
with all gathered. Timed is the first rank's thread, so no collective and no other program counts.
A block has 7 modules with hooks and 12 tensors; a forward launches LAUNCHES kernels by the cost
model's count. The last line is what a block of 9 modules and 16 tensors, 6 of them gathered, takes
(queries, keys and values apart, as Hugging Face has them): `gather_launches` of cost/framework.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

HIDDEN, LAYERS, STEPS, WARM, TIMES = 64, 12, 8, 3, 3
MODULES, TENSORS, LAUNCHES = 7, 12, 12
NOTHING, ALL = 10**9, 0  # persistence thresholds, in elements
CASES = {"ZeRO-1": (1, ALL), "ZeRO-3, none gathered": (3, NOTHING), "ZeRO-3, all": (3, ALL)}


def main() -> None:
    """Run the cases in turns, and print what their medians come to."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for name, (stage, threshold) in TIMES * list(CASES.items()):
        runs[name].append(_ran(stage, threshold))
    for name, times in runs.items():
        told = ", ".join(f"{forward:.0f} and {backward:.0f}" for forward, backward in times)
        print(f"{name:22s} us of a block's forward and backward: {told}")
    plain, none, every = (
        tuple(median(part) for part in zip(*times, strict=True)) for times in runs.values()
    )
    launch = plain[0] / LAUNCHES
    module = [(n - p) / MODULES for n, p in zip(none, plain, strict=True)]
    module[1] -= module[0]  # a backward holds the recomputed forward's hooks
    tensor = (every[0] - none[0]) / TENSORS
    print(
        f"a launch {launch:.0f} us, a module's hooks {module[0]:.0f} us in a forward and "
        f"{module[1]:.0f} in a backward, a tensor's gather and release {tensor:.0f} us"
    )
    passes = (module[0], module[0], module[1])  # forward, recomputed forward, backward
    each = [(9 * hooks + 6 * tensor) / launch / 16 for hooks in passes]
    print(f"launches a tensor, mean of three passes: {sum(each) / 3:.2f}")


def _ran(stage: int, threshold: int) -> tuple[float, float]:
    """Microseconds a block of a forward, and of a backward with its recomputation."""
    with tempfile.TemporaryDirectory() as folder:
        told = (str(stage), str(threshold), f"{folder}/meeting")
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), *told],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]
        first, _ = [process.communicate()[0] for process in processes]
    line = next(one for one in first.splitlines() if one.startswith("seconds"))
    forward, backward = (float(part) for part in line.split()[1:])
    return 1e6 * forward / LAYERS, 1e6 * backward / LAYERS


def _train(rank: int, stage: int, threshold: int, meeting: str) -> None:
    """One rank's steps; prints the median seconds of forward and backward."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    engine = _engine(stage, threshold)
    x = torch.randn(1, 4, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    times = []
    for _ in range(WARM + STEPS):
        began = time.thread_time()
        loss = engine(x)
        between = time.thread_time()
        engine.backward(loss)
        times.append((between - began, time.thread_time() - between))
        engine.step()
    forward, backward = (median(part) for part in zip(*times[WARM:], strict=True))
    print(f"seconds {forward} {backward}", flush=True)


def _engine(stage: int, threshold: int) -> Any:
    """DeepSpeed around the blocks."""
    import deepspeed

    model = _blocks()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": threshold,
            "stage3_model_persistence_threshold": NOTHING,
        },
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _blocks() -> Any:
    """GPT blocks, each recomputed in full, and a loss of their output."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part[:, None] for part in self.qkv(self.first(x)).chunk(3, -1))
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended[:, 0])
            return x + self.down(nn.functional.gelu(self.up(self.second(x))))

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x.float().pow(2).mean()

    return Blocks()


if __name__ == "__main__":
    if len(sys.argv) == 5:
        _train(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
