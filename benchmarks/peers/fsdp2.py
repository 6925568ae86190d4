"""FSDP2 on one GPU or several, with parameters, gradients and optimizer state in host memory.

    python -m benchmarks.peers.fsdp2 llama-like-5.5b --micro-batch 4

fully_shard of each block and of the rest, bf16 compute, fp32 gradients, torch's fused AdamW on the
CPU, clipping. Page-locked memory unless --pageable. --resident leaves a step's bf16 weights and
fp32 sums of gradients on the GPU between its micro-batches (6 bytes a parameter there): weights are
fetched and gradients brought home once a step instead of once a micro-batch. --state gpu leaves
everything on the GPUs. With --together N, neighbouring ranks share one copy of all states, and
parts of gradients are summed over such groups (hybrid sharding). --meta makes first weights of
parts, rank by rank: for models that one GPU does not hold. With --exact such weights are
page-locked in their own size and gradients stay pageable: torch's allocator rounds each page-locked
buffer up to a power of two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from benchmarks.peers import frame

LOCKED = 1 << 20  # bytes of a tensor that has pages of its own


def shard(model: LlamaForCausalLM, args: argparse.Namespace) -> FSDPModule:
    """Each block a group of its own, the embedding, last norm and head another."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if args.state == "cpu":
        offload = CPUOffloadPolicy(pin_memory=not (args.pageable or args.exact))
    mesh = copies(args.together, args.device) if args.together else None
    for layer in model.model.layers:
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=not args.resident,
        )
    sharded: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return sharded


def copies(together: int, device: str) -> DeviceMesh:
    """Ranks by the copy that they share, and by their part of it."""
    shape = frame.place().ranks // together, together
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def page_lock(part: Tensor) -> None:
    """Where it is; small tensors share pages with others and stay pageable."""
    if part.nbytes >= LOCKED:
        code = torch.cuda.cudart().cudaHostRegister(part.data_ptr(), part.nbytes, 0)
        if int(code):
            raise RuntimeError(
                f"{part.nbytes} bytes cannot be page-locked: CUDA's error {int(code)}"
            )


def fill(model: LlamaForCausalLM, args: argparse.Namespace) -> None:
    """First weights for a sharded model without any: matrices drawn, vectors of norms one.

    Ranks that have the same part, of other copies, draw the same.
    """
    model.to_empty(device="cpu" if args.state == "cpu" else args.device)
    here = frame.place()
    torch.manual_seed(here.rank % (args.together or here.ranks))
    with torch.no_grad():
        for weight in model.parameters():
            part = weight.to_local() if isinstance(weight, DTensor) else weight
            if args.exact:
                page_lock(part)
            if weight.dim() > 1:  # drawn on the GPU: a core of the host takes 4 s for 1e9 of them
                part.copy_(torch.empty(part.shape, device=args.device).normal_(std=0.02))
            else:
                part.fill_(1.0)
    rotary = model.model.rotary_emb  # its frequencies are no weights, and are empty, too
    with torch.device(args.device):
        model.model.rotary_emb = type(rotary)(model.config)


def laps() -> Callable[[str], None]:
    """Tells what the host did, and for how long since it last told; the GPU may be at it yet."""
    since = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal since
        now = time.perf_counter()
        frame.say(f"lap {what}: {now - since:.2f} s")
        since = now

    return lap


def prepare(args: argparse.Namespace) -> Callable[[list[Tensor]], Tensor]:
    """The model sharded, and the function that trains one step."""
    # The norm of gradients in host memory goes through gloo.
    frame.join("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    model = frame.build_model(args, device="meta" if args.meta else None)
    if args.compile == "layers":
        frame.compile_layers(model)
    sharded = shard(model, args)
    if args.meta:
        fill(model, args)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=frame.LEARNING_RATE, weight_decay=frame.WEIGHT_DECAY, fused=True
    )

    def train(batches: list[Tensor]) -> Tensor:
        total = torch.zeros((), device=args.device)
        lap = laps()
        for index, words in enumerate(batches):
            if args.resident:
                last = index == len(batches) - 1
                sharded.set_requires_gradient_sync(last)
                sharded.set_reshard_after_backward(last)
            loss = frame.loss_of(model, words) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            lap(f"micro-batch {index + 1} of {len(batches)}")
        nn.utils.clip_grad_norm_(model.parameters(), frame.CLIP)
        lap("clipping")
        optimizer.step()
        optimizer.zero_grad()
        lap("update")
        return total

    return train


def main() -> None:
    """Read the command line and measure."""
    parser = frame.parser(__doc__)
    parser.add_argument("--pageable", action="store_true", help="host memory is not page-locked")
    parser.add_argument("--exact", action="store_true", help="see above")
    parser.add_argument("--resident", action="store_true", help="see above")
    parser.add_argument("--state", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--together", type=int, default=0, help="see above; 0: all ranks")
    parser.add_argument("--meta", action="store_true", help="see above")
    parser.add_argument("--compile", choices=["none", "layers"], default="none")
    args = frame.parse(parser)
    if args.exact and not args.meta:
        parser.error("--exact page-locks what --meta makes; use both")
    frame.measure("fsdp2", args, lambda: prepare(args))


if __name__ == "__main__":
    main()
