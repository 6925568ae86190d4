"""What every peer shares: the model, the tokens, the clock, and one JSON line at the end.

A peer prepares whatever it trains with and hands over a function that trains one step; the frame
times it. The tokens of a step and the first weights come from fixed seeds, so on one machine the
losses of all peers can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bigplan.errors import BigplanError
from bigplan.spec.catalog import find_model
from bigplan.spec.hf_write import to_hf_config

CLIP, LEARNING_RATE, WEIGHT_DECAY = 1.0, 3e-5, 0.01


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all peers have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("model", help="a llama-style model of the catalog, or a file")
    made.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    made.add_argument("--length", type=int, default=4096, help="tokens in a sequence")
    made.add_argument("--micro-batch", type=int, default=4, help="sequences at a time")
    made.add_argument("--steps", type=int, default=4, help="the first is not in the median")
    made.add_argument("--recompute", choices=["none", "full"], default="full")
    made.add_argument("--gpu-limit", type=float, help="GiB of the GPU, from the first step on")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return made


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line. Ends the process where it names no model, or cuts a step in parts."""
    args = parser.parse_args()
    try:
        to_hf_config(find_model(args.model))
    except BigplanError as error:
        parser.error(str(error))
    group = args.length * args.micro_batch
    if args.tokens % group:
        parser.error(
            f"--tokens {args.tokens} is not a multiple of --length x --micro-batch = {group}; "
            "change one of them"
        )
    if args.steps < 2:
        parser.error(f"--steps {args.steps} leaves none to measure, as the first warms up; use 2")
    return args


def micro_batches(args: argparse.Namespace) -> int:
    """How many a step has."""
    return int(args.tokens // (args.length * args.micro_batch))


def build_model(args: argparse.Namespace, *, reentrant: bool = False) -> PreTrainedModel:
    """Transformers' model of the kind in fp32 on the device, from seed 0.

    `reentrant` picks torch's older way to recompute, which runs without autograd's hooks on saved
    tensors.
    """
    dimensions = to_hf_config(find_model(args.model))
    config = AutoConfig.for_model(**dimensions, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(args.device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.train()
    if args.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def compile_layers(model: PreTrainedModel) -> None:
    """Each block by torch.compile, in place; they are alike, so one is compiled."""
    for layer in model.model.layers:
        layer.compile()


def token_batches(args: argparse.Namespace, step: int) -> list[Tensor]:
    """The step's micro-batches on the device: [micro-batch, length] of tokens below 256."""
    source = torch.Generator().manual_seed(step)
    shape = (micro_batches(args), args.micro_batch, args.length)
    return list(torch.randint(256, shape, generator=source).to(args.device))


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    loss: Tensor = model(input_ids=words, labels=words).loss
    return loss


def join_alone(backend: str) -> None:
    """A process group of this process only."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def measure(
    peer: str, args: argparse.Namespace, prepare: Callable[[], Callable[[list[Tensor]], Tensor]]
) -> None:
    """Prepare, train the steps, and print the record; with "error" in it where that failed.

    `prepare` returns the function that trains one step on its micro-batches and returns their mean
    loss. An exception is recorded and raised again, for its traceback.
    """
    record: dict[str, Any] = {"peer": peer, "settings": vars(args), "seconds": [], "losses": []}
    try:
        begun = time.perf_counter()
        train = prepare()
        record["start_seconds"] = time.perf_counter() - begun
        if args.device == "cuda":
            hold_gpu(args.gpu_limit)
        for step in range(args.steps):
            seconds, loss = timed(train, token_batches(args, step), args.device)
            record["seconds"].append(seconds)
            record["losses"].append(loss)
            print(f"step {step + 1}: {seconds:.3f} s, loss {loss:.4f}", file=sys.stderr, flush=True)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        record["error"] = f"{type(error).__name__}: {lines[0]}"
        raise
    else:
        median = statistics.median(record["seconds"][1:])
        record |= {"median_seconds": median, "tokens_per_second": args.tokens / median}
    finally:
        record |= memory(args.device) | {"versions": versions()}
        print(json.dumps(record, default=str), flush=True)


def hold_gpu(limit: float | None) -> None:
    """Forget the peak of the preparation; with a limit in GiB, refuse memory above it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if limit is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit * 2**30 / total)


def timed(
    train: Callable[[list[Tensor]], Tensor], batches: list[Tensor], device: str
) -> tuple[float, float]:
    """Seconds of one step, from an idle device to an idle device, and its loss."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    loss = train(batches)
    wait()
    seconds = time.perf_counter() - start
    return seconds, float(loss)


def memory(device: str) -> dict[str, int | None]:
    """Peak bytes of the GPU since the preparation, and of the host since the start.

    Page-locked memory that CUDA itself allocates need not be resident by the kernel's count; it
    stands beside.
    """
    peaks: dict[str, int | None] = {
        "host_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    }
    if device == "cuda":
        peaks |= {
            "gpu_peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "gpu_peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "torch_pinned_peak_bytes": torch.cuda.host_memory_stats().get("allocated_bytes.peak"),
        }
    return peaks


def versions() -> dict[str, str]:
    """Of what took part."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    if "deepspeed" in sys.modules:  # copied beside, without metadata
        found["deepspeed"] = sys.modules["deepspeed"].__version__.strip()
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda or "none", "gpu": torch.cuda.get_device_name()}
    return found
