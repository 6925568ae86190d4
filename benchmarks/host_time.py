"""What the host's Python takes of a step, action by action, beside the GPU's time and the plan's.

    python -m benchmarks.host_time OUT.json [CASE ...]
    python -m benchmarks.peers.ranks 2 host_time OUT.json CASE     on two GPUs: a case of RANKS

Each case is a model, a training and pinned decisions (CASES); its plan runs for a few steps on the
runtime's worker. Per action are kept: seconds of its lane's thread on a core (`cpu`, waits apart),
seconds on the host's clock from its begin to its end (`host`), and seconds on the device.
BIGPLAN_CLUSTER is a cluster file in place of h200-1x; what its host takes of layers is measured
once more just before a case is planned, as a host's speed changes from minute to minute; but not
with several ranks, which must have one plan. The first rank tells. HOST_TIME_THREADS in
the environment: "one" for what stays on the GPU, or one for each of the "lanes", whatever the plan.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigplan.plan import Plan

RANK, WORLD = (
    int(os.environ.get(name, ones)) for name, ones in (("RANK", "0"), ("WORLD_SIZE", "1"))
)
STEPS = int(os.environ.get("HOST_TIME_STEPS", "8"))


def small(name: str, **changes: Any) -> dict[str, Any]:
    """A llama-style model of few or narrow layers."""
    model = {
        "name": name,
        "layers": 16,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 8,
        "ffn": 2816,
        "vocab": 32000,
        "max_sequence_length": 4096,
        "source": "made up for this measurement",
    }
    return model | changes


GPT2 = {"sequence_length": 1024, "global_batch": 32}
SMALL = {"sequence_length": 256, "global_batch": 4}
ON_GPU = {"optimizer": "gpu"}
ALONE = {"micro_batch": 1, "optimizer": "gpu"}
AWAY = {"micro_batch": 1, "parameters": "host", "optimizer": "host", "gradients": "host"}
QWEN = small(
    "qwen-like-0.5b",
    layers=24,
    hidden=896,
    heads=14,
    kv_heads=2,
    ffn=4864,
    vocab=151936,
    tied_embeddings=True,
    qkv_bias=True,
)
GPT2_SMALL = small(
    "gpt2-small",
    layers=12,
    hidden=768,
    heads=12,
    kv_heads=12,
    ffn=3072,
    vocab=50257,
    norm="layernorm",
    mlp="gelu_tanh",
    positions="learned",
    tied_embeddings=True,
    qkv_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
)
OPT = GPT2_SMALL | {
    "name": "opt-like-350m",
    "layers": 24,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 16,
    "ffn": 4096,
    "mlp": "relu",
}
WHOLE = {"sequence_length": 2048, "global_batch": 8}
TORCH = {"kernels": "torch"}
LONG = {"sequence_length": 4096, "global_batch": 16}
OPT_13B = {"sequence_length": 2048, "global_batch": 16}
SHORT = {"sequence_length": 512, "global_batch": 32}
RANKS = ("0.6b-zero3", "0.6b-zero3-graphs", "0.6b-z1", "tiny-zero3")
TINY = {"sequence_length": 64, "global_batch": 8}
NARROW = small("narrow-48", layers=48, hidden=2048, heads=16, ffn=5632)
Case = tuple[Any, dict[str, Any], dict[str, Any], dict[str, str]]
CASES: dict[str, Case] = {  # model, training, decisions, caps
    "gpt2-xl-free": ("gpt2-xl", GPT2, {}, {}),
    "gpt2-xl-pinned": ("gpt2-xl", GPT2, ON_GPU, {}),
    "gpt2-xl-no-drive": ("gpt2-xl", GPT2, {}, {"nvme": "0 B"}),
    "gpt2-xl-mb4": ("gpt2-xl", GPT2, {"micro_batch": 4, "optimizer": "gpu"}, {}),
    "narrow-48": (NARROW, {"sequence_length": 1024, "global_batch": 4}, {}, {}),
    "qwen-0.5b": (QWEN, {"sequence_length": 1024, "global_batch": 8}, {}, {}),
    "opt-350m": (OPT, {"sequence_length": 512, "global_batch": 4}, {}, {}),
    "gpt2-small": (
        GPT2_SMALL,
        {"sequence_length": 512, "global_batch": 16},
        {"micro_batch": 4},
        {},
    ),
    # Shipped since the host's prices were made: nothing was fitted to them.
    "qwen3-0.6b": ("qwen3-0.6b", WHOLE, {}, {}),
    "llama-3.2-1b": ("llama-3.2-1b", WHOLE, {}, {}),
    "stablelm-2-1.6b": ("stablelm-2-1.6b", WHOLE, {}, {}),
    # Whole steps with torch's norms, activations, positions, loss and AdamW, beside those above.
    "qwen3-0.6b-torch": ("qwen3-0.6b", WHOLE | TORCH, {}, {}),
    "llama-3.2-1b-torch": ("llama-3.2-1b", WHOLE | TORCH, {}, {}),
    "gpt2-xl-torch": ("gpt2-xl", GPT2 | TORCH, {}, {}),
    "opt-13b": ("opt-13b", OPT_13B, {}, {}),
    "opt-13b-torch": ("opt-13b", OPT_13B | TORCH, {}, {}),
    "5.5b-24gib": ("llama-like-5.5b", LONG, {}, {"gpu": "24 GiB"}),
    "5.5b-24gib-torch": ("llama-like-5.5b", LONG | TORCH, {}, {"gpu": "24 GiB"}),
    "gpt2-xl-mb1": ("gpt2-xl", SMALL, {**ALONE, "block.recompute": "none"}, {}),
    "gpt2-xl-mb1-full": ("gpt2-xl", SMALL, {**ALONE, "block.recompute": "full"}, {}),
    "gpt2-xl-host": ("gpt2-xl", SMALL, AWAY, {}),
    "llama-mb1": (small("tiny-16"), SMALL, {**ALONE, "block.recompute": "none"}, {}),
    "llama-mb1-full": (small("tiny-16"), SMALL, {**ALONE, "block.recompute": "full"}, {}),
    "llama-mb1-host": (small("tiny-16"), SMALL, AWAY, {}),
    # What each of two ranks has of the next, alone.
    "0.6b-launched": (
        "qwen3-0.6b",
        SHORT | {"global_batch": 16},
        {"micro_batch": 16, "captured": 0},
        {},
    ),
    # Of two ranks: 0.209 s a step on two H200s on 2026-11-25, with threads apart.
    "0.6b-zero3": ("qwen3-0.6b", SHORT, {"zero": 3, "captured": 0}, {}),
    "0.6b-zero3-graphs": ("qwen3-0.6b", SHORT, {"zero": 3}, {}),
    "0.6b-z1": ("qwen3-0.6b", SHORT, {"zero": 1, "captured": 0}, {}),
    # To see that it runs, on any machine.
    "tiny": ("tiny-llama-test", TINY, {}, {}),
    "tiny-zero3": ("tiny-llama-test", TINY, {"zero": 3}, {}),
    "mistral-12gib": (
        "mistral-7b",
        {"sequence_length": 4096, "global_batch": 16, "gradient_precision": "bf16"},
        {},
        {"gpu": "12 GiB"},
    ),
}


def cluster_now() -> Any:
    """BIGPLAN_CLUSTER with what the host takes of layers at this moment."""
    from bigplan.spec.catalog import find_cluster

    given = os.environ.get("BIGPLAN_CLUSTER")
    if given is None:
        return "h200-1x"
    import torch

    if WORLD > 1 or not torch.cuda.is_available():
        return given
    from bigplan.profile.bench import Bench
    from bigplan.profile.narrow import measure_narrow
    from bigplan.profile.stream import measure_launch

    cluster = find_cluster(given)
    bench = Bench((torch.device("cuda", 0),), os.cpu_count() or 1, 1)
    group = measure_narrow(measure_launch(cluster.group, bench, 0.5), bench, 3.0)
    names = ("launch_overhead", "operator_overhead", "kernel_overhead", "action_overhead")
    told = ", ".join(f"{name} {1e6 * getattr(group.gpu, name):.1f}" for name in names)
    print(f"  now: {told} us", flush=True)
    return cluster.model_copy(update={"node_groups": (group,)})


def plan_of(name: str) -> Plan:
    """The case's plan. Raises BigplanError."""
    from bigplan.planner import Request, make_plan
    from bigplan.spec.experiment import Experiment

    model, training, decisions, caps = CASES[name]
    experiment = Experiment.model_validate(
        {
            "model": model,
            "cluster": cluster_now(),
            "training": training,
            "set": decisions,
            "caps": caps,
        }
    )
    return make_plan(Request.of(experiment))


@contextmanager
def logged() -> Iterator[list[tuple[Any, float]]]:
    """Every action of the block with the seconds that its lane's thread was on a core."""
    from bigplan.runtime.execution.lanes import Lanes

    log: list[tuple[Any, float]] = []
    execute = Lanes._execute

    def timed(self: Any, done: Any, stream: Any, earlier: Any) -> None:
        began = time.thread_time()
        execute(self, done, stream, earlier)
        log.append((done, time.thread_time() - began))

    Lanes._execute = timed  # type: ignore[method-assign]
    try:
        yield log
    finally:
        Lanes._execute = execute  # type: ignore[method-assign]


def step_of(worker: Any) -> dict[str, Any]:
    """A step's seconds, loss and norm."""
    cpu = time.process_time()
    result = worker.step()
    return {
        "seconds": result.seconds,
        "outside": result.seconds - result.timeline.seconds,
        "process_cpu": time.process_time() - cpu,
        "norm": result.gradient_norm,
        "loss": result.loss,
    }


def medians(log: list[tuple[Any, float]], kinds: Sequence[str]) -> dict[str, list[float]]:
    """By kind of action: how many, and the medians of core, host and device in microseconds."""
    actions: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for done, seconds in log:
        action = done.action
        device = done.event.end - done.event.start if done.event else 0.0
        key = f"{action.lane.value}/{action.op.value}/{kinds[action.layer]}/{action.recompute}"
        actions[key].append((seconds, done.ended_at - done.started_at, device))
    return {
        key: [len(found), *(1e6 * statistics.median(column) for column in zip(*found, strict=True))]
        for key, found in sorted(actions.items())
    }


def by_lane(log: list[tuple[Any, float]]) -> dict[str, float]:
    """Milliseconds of a step in which the actions of each lane were on a core."""
    found: dict[str, float] = defaultdict(float)
    for done, seconds in log:
        found[done.action.lane.value] += 1e3 * seconds
    return dict(found)


def set_threads(which: str) -> None:
    """Let captured and launched passes share their thread alike: "one", or "lanes"."""
    from bigplan.runtime.execution import lanes

    chosen = lanes.thread_of
    lanes.thread_of = lambda found, captured: chosen(found, captured=which == "one")


def run(name: str) -> dict[str, Any]:
    """Plan the case, run it, and tell."""
    plan = plan_of(name)
    if plan.strategy.ranks != WORLD:
        raise ValueError(
            f"the plan has {plan.strategy.ranks} ranks, and {WORLD} run; use a cluster of one GPU, "
            "or start as many by benchmarks.peers.ranks"
        )
    record = {
        "strategy": plan.strategy.model_dump(exclude_defaults=True),
        "placement": plan.placement.model_dump(exclude_defaults=True, mode="json"),
        "predicted": plan.predicted.step_seconds,
        "promised_memory": {str(u.tier): u.used_bytes for u in plan.predicted.memory},
        "gpu_cap": plan.cluster.group.gpu.memory,
    } | measured(plan)
    if RANK == 0:
        tell(name, record)
    return record


def measured(plan: Plan) -> dict[str, Any]:
    """Seconds, actions and GPU memory of a few steps of the plan."""
    import torch

    from benchmarks.limit_run import alike
    from bigplan.runtime import worker as module
    from bigplan.runtime.worker import NativeWorker

    module.first_values = alike  # type: ignore[attr-defined]
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    worker = NativeWorker(plan, RANK, Path(mkdtemp()))
    steps = []
    with logged() as log:
        try:
            worker.preflight()
            worker.start(Path(os.environ["PEERS_MEETING"]) if WORLD > 1 else Path())
            for _ in range(STEPS):
                log.clear()
                steps.append(step_of(worker))
            free, total = torch.cuda.mem_get_info() if cuda else (0, 0)
            actions = medians(log, plan.model.layer_sequence())
            lanes = by_lane(log)
        finally:
            worker.close()
            if cuda:
                torch.cuda.empty_cache()
    return {
        "measured": statistics.median(step["seconds"] for step in steps[1:]),
        "steps": steps,
        "actions_us": actions,
        "lanes_ms": lanes,
        "peak_allocated": torch.cuda.max_memory_allocated() if cuda else 0,
        "peak_reserved": torch.cuda.max_memory_reserved() if cuda else 0,
        "device_used": total - free,
    }


def tell(name: str, record: dict[str, Any]) -> None:
    """A case's seconds, memory and actions."""
    print(
        f"{name}: predicted {record['predicted']:.4f}, measured {record['measured']:.4f} s, "
        f"process cpu {record['steps'][-1]['process_cpu']:.3f}; {record['strategy']}",
        flush=True,
    )
    allocated, reserved = record["peak_allocated"] / 2**30, record["peak_reserved"] / 2**30
    print(
        f"    GPU GiB: promised {record['promised_memory']['gpu'] / 2**30:.3f}, allocated "
        f"{allocated:.3f}, reserved {reserved:.3f}, in use {record['device_used'] / 2**30:.3f} of "
        f"{record['gpu_cap'] / 2**30:.3f}",
        flush=True,
    )
    told = ", ".join(f"{lane} {spent:.1f}" for lane, spent in record["lanes_ms"].items())
    print(f"    ms on a core: {told}")
    for key, (count, cpu_us, host, device) in record["actions_us"].items():
        print(f"    {key}: {count} x cpu {cpu_us:.0f} host {host:.0f} device {device:.0f} us")


def main() -> None:
    """Read the command line."""
    out = Path(sys.argv[1])
    if which := os.environ.get("HOST_TIME_THREADS"):
        set_threads(which)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name in sys.argv[2:] or [name for name in CASES if name not in RANKS]:
        try:
            found[name] = run(name)
        except Exception as error:  # noqa: BLE001 - the next case may run
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            found[name] = {"error": str(error)}
        if RANK == 0:
            out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
