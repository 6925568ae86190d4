"""Training adapters on one GPU: bigplan's promises and steps, and a plain loop of transformers.

    python -m benchmarks.lora OUT [PART ...]

Parts: `resident` (LoRA of Llama 3 8B, all on the GPU), `streamed` (the same with the GPU held to
14 GiB, so that frozen weights pass through it from host memory), `large` (40 blocks of Llama 3
70B's shape, 36 B parameters, the GPU held to 24 GiB), `packed` and `packed-70b` (frozen blocks in
4 bits: 8B with the GPU held to 14 GiB, all of 70B to 24 GiB), `unpack` (the kernel that opens such
matrices), `packing` (how fast they are packed, and how soon launches of 8B and 70B take a step),
and as peers of the first `plain` and `compiled`: transformers' model with the same adapters and
torch's fused AdamW, its blocks compiled or not; of `packed` `qlora`: transformers, peft and
bitsandbytes' NF4, with Liger's kernels. All weights are random. OUT gets cluster.yaml,
lora.json, and the runs. About eight minutes on an H200 by estimate. Without a GPU: small shapes, to
see that everything runs; its figures mean nothing.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import lora_packing
from benchmarks.parts import CUDA, Asked, bigplan, gpu, newest
from bigplan.spec.catalog import find_model
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.hf.config import to_hf_config
from bigplan.spec.model import ModelSpec

DEVICE = "cuda" if CUDA else "cpu"
RANK = 16
LENGTH, BATCH = (4096, 8) if CUDA else (64, 4)
STEPS = 8 if CUDA else 3
PEERS = ("plain", "compiled", "qlora")
PARTS = ("unpack", "packing", "resident", "streamed", "packed", "large", "packed-70b", *PEERS)
CAPS = {
    "streamed": {"gpu": "14 GiB"},
    "packed": {"gpu": "14 GiB"},
    "large": {"gpu": "24 GiB", "host": "100 GiB"},
    "packed-70b": {"gpu": "24 GiB", "host": "100 GiB"},
}
LARGE = ("large", "packed-70b")
SMALL = {"hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 256}


def model_of(part: str) -> ModelSpec:
    """Llama 3's shapes, or small ones without a GPU."""
    found = find_model("llama-3-70b" if part in LARGE else "llama-3-8b").model_dump()
    changed: dict[str, Any] = {} if CUDA else SMALL | {"layers": 2}
    if CUDA and part == "large":
        changed = {"name": "llama-3-70b-40-blocks", "layers": 40}
    return ModelSpec.model_validate(found | changed)


def settings(part: str, out: Path) -> dict[str, Any]:
    """What a part trains, where and how, but for its model."""
    batch = BATCH // 2 if part in LARGE else BATCH
    frozen = {"frozen": "nf4"} if part.startswith("packed") else {}
    training = {
        "sequence_length": LENGTH,
        "global_batch": batch,
        "precision": "bf16" if CUDA else "fp32",
        "optimizer": {"learning_rate": 1e-4},
        "lora": {"rank": RANK} | frozen,
    }
    given: dict[str, Any] = {
        "cluster": str(out / "cluster.yaml"),
        "training": training,
        "engine": "native",
    }
    if CUDA and part in CAPS:
        given["caps"] = CAPS[part]
    return given


def launched(part: str, out: Path) -> dict[str, Any]:
    """A launch's seconds a step and bytes, beside its promises."""
    model, path = model_of(part), out / f"{part}.yaml"
    (out / f"{part}-model.yaml").write_text(to_yaml(model))
    given = settings(part, out) | {"model": str(out / f"{part}-model.yaml")}
    path.write_text(json.dumps(given))  # JSON is YAML
    runs = out / "runs" / part
    options = ("--steps", str(STEPS), "--checkpoint-keep", "0", "--run-dir", str(runs))
    bigplan("launch", str(path), *options)
    record = newest(runs.iterdir())
    seconds = median(metric.seconds for metric in record.metrics[2:] or record.metrics)
    return {
        "seconds": seconds,
        "promised": record.summary.predicted_step_seconds,
        "tokens a second": given["training"]["global_batch"] * LENGTH / seconds,
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
    ways = ((2, False), (1, False), (2, True))
    for micro_batch, checkpointed in ways:
        try:
            found = _measured(part, micro_batch, checkpointed=checkpointed)
        except torch.OutOfMemoryError:
            failed.append([micro_batch, checkpointed])
        else:
            return found | {"out of memory": failed}
        gc.collect()
        torch.cuda.empty_cache()
    return {"out of memory": failed}


def _measured(part: str, micro_batch: int, *, checkpointed: bool) -> dict[str, Any]:
    model, trained = _qlora() if part == "qlora" else _peer(part == "compiled")
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


def _qlora() -> tuple[Any, list[nn.Parameter]]:
    """As documented for QLoRA: peft on matrices in NF4, and Liger's kernels in place of eager."""
    import bitsandbytes
    import peft
    import transformers
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    config: Any = to_hf_config(model_of("packed")) | {"use_cache": False}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model: Any = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**config, attn_implementation="sdpa")
        )
    torch.set_default_dtype(torch.float32)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, module in list(parent.named_children()):
                if isinstance(module, nn.Linear):
                    packed = bitsandbytes.nn.Linear4bit(
                        module.in_features, module.out_features, bias=False, quant_type="nf4",
                        compute_dtype=torch.bfloat16, device="meta",
                    )  # fmt: skip
                    values = module.weight.data.cpu()
                    packed.weight = bitsandbytes.nn.Params4bit(
                        values, requires_grad=False, quant_type="nf4", module=packed
                    ).to(DEVICE)
                    setattr(parent, name, packed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapters = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets)
    model = peft.get_peft_model(model, adapters)
    return model, [p for p in model.parameters() if p.requires_grad]


def unpack() -> dict[str, Any]:
    """Milliseconds to open a matrix of Llama 3 8B's MLP, beside its bytes at a copy's rate."""
    from bigplan.kernels.handwritten.four_bits import unpacked
    from bigplan.runtime.linear import four_bits

    shape = (14336, 4096) if CUDA else (64, 128)
    matrix = torch.randn(shape, device=DEVICE)
    stored = four_bits.packed(matrix, torch.bfloat16)
    assert not CUDA or torch.equal(unpacked(stored), four_bits.unpacked(stored))
    if not CUDA:
        return {}
    import triton

    def milliseconds(work: Any) -> float:
        return float(triton.testing.do_bench(work, rep=200, return_mode="median"))

    copied = matrix.to(torch.bfloat16)
    target = torch.empty_like(copied)
    taken, copy = milliseconds(lambda: unpacked(stored)), milliseconds(lambda: target.copy_(copied))
    rate = 4 * matrix.numel() / copy
    return {
        "ms": taken,
        "copy of its bytes ms": (2 * matrix.numel() + stored.nbytes) / rate,
        "plain torch ms": milliseconds(lambda: four_bits.unpacked(stored)),
    }


def packing(out: Path) -> dict[str, Any]:
    """Weights a second, and seconds to the first steps of 8B and 70B in 4 bits."""
    small = ModelSpec.model_validate(model_of("packed").model_dump() | {"layers": 2})
    weights = lora_packing.written(small, out / "two-blocks", DEVICE)
    found: dict[str, Any] = lora_packing.rates(small, weights, DEVICE)
    print(*lora_packing.shown(found), sep="\n", flush=True)
    gc.collect()
    torch.cuda.empty_cache()  # launches want the GPU
    for part, drawn in (("packed", True), ("packed", False), ("packed-70b", True)):
        model, given = model_of(part), settings(part, out)
        if not drawn:
            shutil.rmtree(weights)
            weights = lora_packing.written(model, out / "weights", DEVICE)
            torch.cuda.empty_cache()
            given["training"]["weights"] = str(weights)
        name = f"{part}, {'drawn' if drawn else 'out of files'}"
        found[name] = lora_packing.first_step(given, model, out / "first-step")
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    shutil.rmtree(weights)
    return found


def main() -> None:
    """All parts, or those that are named; what was found before stays in the file."""
    asked = Asked.of(__doc__, "lora", PARTS)
    parts = [part for part in PARTS if part in asked.parts]  # what peers leave taken comes last
    asked.cluster()
    print(f"torch {torch.__version__}, {gpu()}", flush=True)
    works: dict[str, Callable[[], dict[str, Any]]] = {
        "unpack": unpack,
        "packing": partial(packing, asked.out),
    }
    works |= {part: partial(peer, part) for part in PEERS}
    for part in parts:
        try:
            one = works[part]() if part in works else launched(part, asked.out)
        except subprocess.CalledProcessError as error:
            one = {"failed": error.returncode}
        print(f"{part}: {json.dumps(one)}", flush=True)
        asked.keep(part, one)
        gc.collect()


if __name__ == "__main__":
    main()
