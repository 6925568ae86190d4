"""Training adapters on one GPU: bigplan's promises and steps, and a plain loop of transformers.

    python -m benchmarks.lora OUT [PART ...]

Parts: `resident` (LoRA of Llama 3 8B, all on the GPU), `streamed` (the same with the GPU held to
14 GiB, so that frozen weights pass through it from host memory), `large` (40 blocks of Llama 3
70B's shape, 36 B parameters, the GPU held to 24 GiB), and as peers of the first `plain` and
`compiled`: transformers' model with the same adapters and torch's fused AdamW, its blocks compiled
or not. All weights are random. OUT gets cluster.yaml, lora.json, and the runs. About four minutes
on an H200 by estimate. Without a GPU: small shapes, to see that everything runs; its figures mean
nothing.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bigplan.launcher.record import read_record
from bigplan.spec.catalog import find_model
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.hf.config import to_hf_config
from bigplan.spec.model import ModelSpec

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
RANK = 16
LENGTH, BATCH = (4096, 8) if CUDA else (64, 4)
STEPS = 6 if CUDA else 3
PARTS = ("resident", "streamed", "large", "plain", "compiled")
PEERS = ("plain", "compiled")
CAPS = {"streamed": {"gpu": "14 GiB"}, "large": {"gpu": "24 GiB", "host": "100 GiB"}}
SMALL = {"hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 256}


def model_of(part: str) -> ModelSpec:
    """Llama 3's shapes, or small ones without a GPU."""
    large = part == "large"
    found = find_model("llama-3-70b" if large else "llama-3-8b").model_dump()
    layers = (40 if large else 32) if CUDA else 2
    name = f"llama-3-{'70b-40-blocks' if large else '8b'}"
    small = {} if CUDA else SMALL
    return ModelSpec.model_validate(found | {"name": name, "layers": layers} | small)


def launched(part: str, out: Path) -> dict[str, Any]:
    """A launch's seconds a step and bytes, beside its promises."""
    model, path = model_of(part), out / f"{part}.yaml"
    (out / f"{part}-model.yaml").write_text(to_yaml(model))
    batch = BATCH // 2 if part == "large" else BATCH
    training = {
        "sequence_length": LENGTH,
        "global_batch": batch,
        "precision": "bf16" if CUDA else "fp32",
        "optimizer": {"learning_rate": 1e-4},
        "lora": {"rank": RANK},
    }
    given: dict[str, Any] = {
        "model": str(out / f"{part}-model.yaml"),
        "cluster": str(out / "cluster.yaml"),
        "training": training,
        "engine": "native",
    }
    if CUDA and part in CAPS:
        given["caps"] = CAPS[part]
    path.write_text(json.dumps(given))  # JSON is YAML
    runs = out / "runs" / part
    options = ("--steps", str(STEPS), "--checkpoint-keep", "0", "--run-dir", str(runs))
    _bigplan("launch", str(path), *options)
    record = read_record(sorted(runs.iterdir())[-1])
    seconds = median(metric.seconds for metric in record.metrics[2:] or record.metrics)
    return {
        "seconds": seconds,
        "promised": record.summary.predicted_step_seconds,
        "tokens a second": batch * LENGTH / seconds,
        "losses": [metric.loss for metric in record.metrics],
        "GiB (promised)": {
            row.tier: [(row.measured or 0) / 2**30, row.predicted / 2**30]
            for row in record.summary.memory
        },
        "strategy": record.plan.strategy.model_dump(),
        "placement": record.plan.placement.model_dump(mode="json"),
    }


class Adapted(nn.Module):
    """A frozen linear module, and an adapter whose fp32 matrices are cast beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.empty(RANK, linear.in_features, device=DEVICE))
        self.b = nn.Parameter(torch.zeros(linear.out_features, RANK, device=DEVICE))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """What both add up to; adapters count 2, as alpha is twice the rank."""
        a, b = self.a.to(x.dtype), self.b.to(x.dtype)
        beside: Tensor = nn.functional.linear(nn.functional.linear(x, a), b)
        y: Tensor = self.linear(x)
        return y + 2 * beside


def _peer(compiled: bool) -> tuple[Any, list[nn.Parameter]]:
    import transformers

    config: Any = to_hf_config(model_of("resident")) | {"use_cache": False}
    torch.set_default_dtype(torch.bfloat16 if CUDA else torch.float32)
    with torch.device(DEVICE):
        model: Any = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**config, attn_implementation="sdpa")
        )
    torch.set_default_dtype(torch.float32)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, module in list(parent.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(parent, name, Adapted(module))
        if compiled:
            layer.compile()
    return model, [p for p in model.parameters() if p.requires_grad]


def peer(part: str) -> dict[str, Any]:
    """Seconds a step and the peak, all on the GPU; checkpointed where it does not fit otherwise."""
    failed = []
    for micro_batch, checkpointed in ((2, False), (1, False), (2, True)):
        try:
            found = _measured(part == "compiled", micro_batch, checkpointed=checkpointed)
        except torch.OutOfMemoryError:
            failed.append([micro_batch, checkpointed])
        else:
            return found | {"out of memory": failed}
        gc.collect()
        torch.cuda.empty_cache()
    return {"out of memory": failed}


def _measured(compiled: bool, micro_batch: int, *, checkpointed: bool) -> dict[str, Any]:
    model, trained = _peer(compiled)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    seconds, losses, count = [], [], BATCH // micro_batch
    for _ in range(STEPS):
        start, total = time.perf_counter(), 0.0
        tokens = torch.randint(model.config.vocab_size, (BATCH, LENGTH), device=DEVICE)
        every = []
        for words in torch.split(tokens, micro_batch):
            loss = model(input_ids=words, labels=words).loss / count
            torch.autograd.backward(loss)
            every.append(loss.detach())
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = float(torch.stack(every).sum())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
        losses.append(total)
    taken = median(seconds[2:] or seconds)
    return {
        "seconds": taken,
        "tokens a second": BATCH * LENGTH / taken,
        "GiB": torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0,
        "micro-batch": micro_batch,
        "checkpointed": checkpointed,
        "losses": losses,  # of random words
    }


def _bigplan(*arguments: str) -> None:
    command = "from bigplan.cli import main; main()"
    subprocess.run([sys.executable, "-c", command, *arguments], check=True)


def main() -> None:
    """All parts, or those that are named; what was found before stays in the file."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    out, parts = Path(sys.argv[1]).resolve(), sys.argv[2:] or PARTS
    out.mkdir(parents=True, exist_ok=True)
    results = out / "lora.json"
    if not (out / "cluster.yaml").exists():
        devices = () if CUDA else ("--cpu-devices", "1")
        _bigplan("detect", *devices, "--folder", str(out), "--out", str(out / "cluster.yaml"))
    name = torch.cuda.get_device_name() if CUDA else "no GPU: small, no times"
    print(f"torch {torch.__version__}, {name}", flush=True)
    found = json.loads(results.read_text()) if results.exists() else {}
    for part in parts:
        try:
            one = peer(part) if part in PEERS else launched(part, out)
        except subprocess.CalledProcessError as error:
            one = {"failed": error.returncode}
        print(f"{part}: {json.dumps(one)}", flush=True)
        found[part] = one | {"device": name, "torch": torch.__version__}
        results.write_text(json.dumps(found, indent=1) + "\n")
        gc.collect()


if __name__ == "__main__":
    main()
