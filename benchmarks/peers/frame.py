"""What every peer shares: the model, the tokens, the clock, and one JSON line at the end.

A peer prepares whatever it trains with and hands over a function that trains one step; the frame
times it. The tokens of a step and the first weights come from fixed seeds, so on one machine the
losses of all peers can be compared.

Several ranks (peers.ranks starts them) share a step's micro-batches out. A step's seconds and the
record are those of the first rank, from when all are idle to when all are; losses are means over
all ranks.
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from bigplan.errors import BigplanError
from bigplan.spec.catalog import find_model
from bigplan.spec.hf.config import to_hf_config

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
    made.add_argument("--loss-chunk", type=int, help="tokens whose logits exist at a time")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    return made


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line. Ends the process where it names no model, or cuts a step in parts."""
    args = parser.parse_args()
    try:
        to_hf_config(find_model(args.model))
    except BigplanError as error:
        parser.error(str(error))
    group = args.length * args.micro_batch * place().ranks
    if args.tokens % group:
        parser.error(
            f"--tokens {args.tokens} is not a multiple of --length x --micro-batch x ranks = "
            f"{group}; change one of them"
        )
    if args.steps < 2:
        parser.error(f"--steps {args.steps} leaves none to measure, as the first warms up; use 2")
    return args


class Place(NamedTuple):
    """Which of how many ranks this process is."""

    rank: int
    ranks: int


def place() -> Place:
    """As peers.ranks tells its processes; alone without it."""
    return Place(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def micro_batches(args: argparse.Namespace) -> int:
    """How many a step has on each rank."""
    return int(args.tokens // (args.length * args.micro_batch * place().ranks))


def build_model(
    args: argparse.Namespace, *, reentrant: bool = False, device: str | None = None
) -> PreTrainedModel:
    """Transformers' model of the kind in fp32 on the device, from seed 0.

    `reentrant` picks torch's older way to recompute, which runs without autograd's hooks on saved
    tensors. `device`: another than the command line's, such as "meta".
    """
    dimensions = to_hf_config(find_model(args.model))
    config = AutoConfig.for_model(**dimensions, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(device or args.device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.train()
    if args.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if args.loss_chunk:
        chunk_loss(model, args.loss_chunk)
    return model


def chunk_loss(model: PreTrainedModel, tokens: int) -> None:
    """Let the model make logits of so many tokens at a time, and again in the backward.

    Those of 131,072 tokens of Llama 3's vocabulary take 31 GiB in bf16, and as many gradients. By
    torch's older way to recompute, the head would have a gradient of each part, which DeepSpeed's
    ZeRO-3 refuses.
    """

    def part(hidden: Tensor, words: Tensor) -> Tensor:
        logits = model.lm_head(hidden).float()
        return functional.cross_entropy(logits, words, reduction="sum")

    def forward(input_ids: Tensor, labels: Tensor) -> CausalLMOutputWithPast:
        hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1].flatten(0, 1)
        words = labels[:, 1:].flatten()
        parts = zip(hidden.split(tokens), words.split(tokens), strict=True)
        sums = [checkpoint(part, *each, use_reentrant=False) for each in parts]
        return CausalLMOutputWithPast(loss=torch.stack(sums).sum() / words.numel())

    model.forward = forward


def compile_layers(model: PreTrainedModel) -> None:
    """Each block by torch.compile, in place; they are alike, so one is compiled."""
    for layer in model.model.layers:
        layer.compile()


def token_batches(args: argparse.Namespace, step: int) -> list[Tensor]:
    """This rank's micro-batches of the step: [micro-batch, length] of tokens below 256.

    They are on the device; those of all ranks together are the same whatever their number.
    """
    source, (rank, ranks) = torch.Generator().manual_seed(step), place()
    shape = (micro_batches(args) * ranks, args.micro_batch, args.length)
    return list(torch.randint(256, shape, generator=source)[rank::ranks].to(args.device))


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    loss: Tensor = model(input_ids=words, labels=words).loss
    return loss


def join(backend: str) -> None:
    """A process group of all ranks, which meet over a file."""
    rank, ranks = place()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    if ranks > 1:
        store = dist.FileStore(os.environ["PEERS_MEETING"], ranks)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def mean_of_ranks(value: Tensor) -> Tensor:
    """Of a number on the device; all ranks wait for each other here."""
    if place().ranks > 1:
        value = value.clone()
        dist.all_reduce(value)
    return value / place().ranks


def measure(
    peer: str, args: argparse.Namespace, prepare: Callable[[], Callable[[list[Tensor]], Tensor]]
) -> None:
    """Prepare, train the steps, and print the record; with "error" in it where that failed.

    `prepare` returns the function that trains one step on its micro-batches and returns their mean
    loss. An exception is recorded and raised again, for its traceback.
    """
    record: dict[str, Any] = {"peer": peer, "settings": vars(args), "seconds": [], "losses": []}
    first, record["ranks"] = place().rank == 0, place().ranks
    try:
        begun = time.perf_counter()
        train = prepare()
        record["start_seconds"] = time.perf_counter() - begun
        say(f"prepared in {record['start_seconds']:.1f} s")
        if args.device == "cuda":
            hold_gpu(args.gpu_limit)
        for step in range(args.steps):
            seconds, loss = timed(train, token_batches(args, step), args.device)
            record["seconds"].append(seconds)
            record["losses"].append(loss)
            say(f"step {step + 1}: {seconds:.3f} s, loss {loss:.4f}")
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        record["error"] = f"{type(error).__name__}: {lines[0]}"
        raise
    else:
        median = statistics.median(record["seconds"][1:])
        record |= {"median_seconds": median, "tokens_per_second": args.tokens / median}
    finally:
        record |= memory(args.device) | {"versions": versions()}
        if first or "error" in record:
            print(json.dumps(record, default=str), flush=True)


def say(text: str) -> None:
    """The first rank's progress, as it goes: it is there even if the process is ended."""
    if place().rank == 0:
        print(text, file=sys.stderr, flush=True)


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
    """Seconds of one step, from idle devices to idle devices, and its loss."""
    float(mean_of_ranks(torch.zeros((), device=device)))
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    loss = mean_of_ranks(train(batches))
    if device == "cuda":
        torch.cuda.synchronize()
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
