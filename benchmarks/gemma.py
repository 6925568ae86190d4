"""Models of Gemma's shapes on one GPU: steps beside their promises, and beside transformers.

    python -m benchmarks.gemma OUT [PART ...]

Parts: `operators` (milliseconds of attention as blocks of both models have it, capped or within a
window, beside its price), `steps` (`bigplan launch` of gemma-2-2b and gemma-3-4b, random weights, a
few steps each, with the plan's promises beside) and `plain` (the same steps by transformers'
modules: bf16 weights, fp32 masters, moments and sums, fused AdamW, blocks checkpointed; eager
attention for Gemma 2, as transformers recommends for training, SDPA for Gemma 3; as they are and
with compiled blocks). OUT gets cluster.yaml, gemma.json, and the runs. About eight minutes on an
H200 by estimate. Without a GPU: small shapes, to see that everything runs; its figures mean
nothing.
"""

from __future__ import annotations

import gc
import json
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.parts import (
    CUDA,
    Asked,
    beside_promises,
    bigplan,
    gpu,
    milliseconds,
    newest,
)
from benchmarks.plain_loop import masters_of
from bigplan.cost.compute import Device, operator_seconds
from bigplan.graph.build import graph_of_shape
from bigplan.graph.operators import Attention
from bigplan.graph.shape import RankShape
from bigplan.graph.strategy import Strategy
from bigplan.runtime.attention import capped
from bigplan.runtime.attention import fused as torchs
from bigplan.spec.catalog import find_model
from bigplan.spec.cluster import Cluster
from bigplan.spec.files.dump import to_yaml
from bigplan.spec.hf.config import to_hf_config
from bigplan.spec.model import ModelSpec
from bigplan.spec.training import Training

DEVICE = "cuda" if CUDA else "cpu"
LENGTH, MICRO_BATCH, GLOBAL_BATCH = (4096, 2, 16) if CUDA else (64, 1, 2)
STEPS = 6 if CUDA else 2
PARTS = ("operators", "steps", "plain")
SMALL = {"layers": 2, "hidden": 48, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16}


def _model(name: str) -> ModelSpec:
    model = find_model(name)
    small = SMALL | {"vocab": 256, "sliding_window": 16, "embedding_scale": 48**0.5}
    return model if CUDA else ModelSpec.model_validate(model.model_dump() | small)


MODELS = tuple(_model(name) for name in ("gemma-2-2b", "gemma-3-4b"))


def operators(model: ModelSpec, cluster: Cluster) -> dict[str, Any]:
    """Milliseconds of attention in each kind of block, measured and priced.

    A price is a mean over all blocks, so it is divided by the part of them that have the operator.
    """
    training = Training(sequence_length=LENGTH, global_batch=MICRO_BATCH, precision="bf16")
    shape = RankShape.on(
        cluster.group.gpu, model, training, Strategy(dp=1, micro_batch=MICRO_BATCH)
    )
    block, device = graph_of_shape(shape, None).kinds["block"], Device(cluster.group.gpu, "bf16")
    parts: dict[int | None, float] = defaultdict(float)  # of the blocks, by the window that hides
    for attends, part in model.attention_shares.items():
        parts[torchs.narrower(attends.window, LENGTH)] += part
    found: dict[str, Any] = {}
    for within, part in parts.items():
        leaves, run = _attends(model, within)
        out = run()
        by_out = torch.randn_like(out)
        ahead = milliseconds(run)
        back = milliseconds(
            lambda out=out, leaves=leaves, by_out=by_out: torch.autograd.grad(
                out, leaves, by_out, retain_graph=True
            )
        )
        for name, took, priced in (
            ("forward", ahead, block.forward),
            ("backward", back, block.backward),
        ):
            of_it = [
                operator_seconds(one, device)
                for one in priced
                if isinstance(one, Attention) and one.window == within
            ]
            promised = 1e3 * sum(of_it) / part
            found[f"{name}, window {within}"] = [took, promised]
    print(f"  {json.dumps(found)}", flush=True)
    return found


def _attends(model: ModelSpec, window: int | None) -> tuple[list[Tensor], Any]:
    counts = model.heads, model.kv_heads, model.kv_heads
    shapes = [(MICRO_BATCH, LENGTH, n, model.head_dim) for n in counts]
    leaves = [
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for shape in shapes
    ]
    q, k, v = leaves
    if model.score_cap is None:
        return leaves, lambda: torchs.attention(q, k, v, window, model.score_scale)
    scores = capped.Scores(model.scale_of_scores, model.score_cap, window)
    return leaves, lambda: capped.attention(q, k, v, scores, generated=CUDA)


def steps(model: ModelSpec, out: Path) -> dict[str, Any]:
    """A launch's seconds a step and bytes, beside its promises."""
    path = out / f"{model.name}.yaml"
    path.write_text(to_yaml(model))
    bigplan(
        *("launch", "--model", str(path), "--cluster", str(out / "cluster.yaml")),
        *("--seq-len", str(LENGTH), "--global-batch", str(GLOBAL_BATCH)),
        *("--precision", "bf16" if CUDA else "fp32", "--engine", "native"),
        *("--steps", str(STEPS), "--checkpoint-keep", "0", "--run-dir", str(out / "runs")),
    )
    found = beside_promises(newest((out / "runs").glob(f"{model.name}-*")))
    print(f"  {json.dumps(found)}", flush=True)
    return found


def plain(model: ModelSpec, compiled: bool) -> dict[str, Any]:
    """Seconds of a step of transformers' modules, and bytes at its peak; or why there are none."""
    import transformers

    config = transformers.AutoConfig.for_model(**to_hf_config(model))
    config._attn_implementation = "eager" if model.score_cap is not None else "sdpa"
    config.use_cache = False
    with torch.device(DEVICE):
        loop: Any = transformers.AutoModelForCausalLM.from_config(config).float().train()
    loop.gradient_checkpointing_enable({"use_reentrant": False})
    masters = masters_of(loop)
    if compiled:
        for block in loop.model.layers:
            block.compile()
    optimizer = torch.optim.AdamW(masters, fused=CUDA)
    weights, took = list(loop.parameters()), []
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        began = time.perf_counter()
        for _ in range(GLOBAL_BATCH // MICRO_BATCH):
            tokens = torch.randint(0, model.vocab, (MICRO_BATCH, LENGTH), device=DEVICE)
            loss = loop(input_ids=tokens, labels=tokens).loss
            (loss * MICRO_BATCH / GLOBAL_BATCH).backward()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        float(loss.detach())  # waits for the device
        took.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    return {"seconds": median(took[2:] or took), "peak": peak}


def _plain_or_why(model: ModelSpec, *, compiled: bool) -> Mapping[str, Any]:
    try:
        found = plain(model, compiled)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        found = {"failed": str(error).splitlines()[0]}
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
    print(f"  compiled {compiled}: {json.dumps(found)}", flush=True)
    return found


def main() -> None:
    """All parts, or those that are named; what was found before stays in the file."""
    asked = Asked.of(__doc__, "gemma", PARTS)
    cluster, out = asked.cluster(), asked.out
    print(f"torch {torch.__version__}, {gpu()}, {GLOBAL_BATCH} x {LENGTH} tokens", flush=True)
    for part in asked.parts:
        for model in MODELS:
            print(f"{part} of {model.name}", flush=True)
            if part == "plain":
                ways = {"eager": False, "compiled": True}
                one: dict[str, Any] = {
                    way: _plain_or_why(model, compiled=flag) for way, flag in ways.items()
                }
            else:
                one = steps(model, out) if part == "steps" else operators(model, cluster)
            asked.keep(f"{part} {model.name}", one)


if __name__ == "__main__":
    main()
